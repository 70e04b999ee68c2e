//! What is tried again and again fails again and again, for one reason or for a few in turn: each is worth one line in the
//! log.

use std::collections::VecDeque;

/// Different words that are remembered of one matter. What fails has few reasons.
const WORDS_MAX: usize = 16;

/// What was said of one matter.
#[derive(Debug, Default)]
pub struct Told(VecDeque<String>);

impl Told {
    /// Whether `words` were not said of late. From now on they were.
    pub fn is_news(&mut self, words: &str) -> bool {
        if self.0.iter().any(|said| said == words) {
            return false;
        }
        if self.0.len() == WORDS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(words.into());
        true
    }

    /// The matter is settled: whatever is said next is news.
    pub fn forget(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_words_are_news_once_until_the_matter_is_settled() {
        let mut told = Told::default();
        assert!(told.is_news("no room"));
        assert!(!told.is_news("no room"));
        told.forget();
        assert!(told.is_news("no room"));
    }

    /// As where one server of two is down and the other refuses.
    #[test]
    fn words_that_alternate_are_news_once_each() {
        let mut told = Told::default();
        let news = (0..1000).filter(|n| told.is_news(["no room", "no folder", "no disk"][n % 3])).count();
        assert_eq!(news, 3);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut told = Told::default();
        assert!((0..100).all(|n| told.is_news(&n.to_string())));
        assert_eq!(told.0.len(), WORDS_MAX);
        assert!(!told.is_news("99") && told.is_news("0"));
    }
}
