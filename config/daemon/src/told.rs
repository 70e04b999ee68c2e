//! What is tried again and again fails again and again, for one reason or for a few in turn: each is worth one line in the
//! log.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Different words that are remembered of one matter. What fails has few reasons.
const WORDS_MAX: usize = 16;

/// How often words past those are said: what has so many differs by a number each time, such as bytes that are free.
const RARELY: Duration = Duration::from_secs(600);

/// What was said of one matter.
#[derive(Debug, Default)]
pub struct Told {
    said: VecDeque<String>,
    last: Option<Instant>,
}

impl Told {
    /// Whether `words` were not said of late, and are to be said. From now on they were. Of one matter that is 16 times at
    /// most, and once in ten minutes from then on, until it is settled.
    pub fn is_news(&mut self, words: &str) -> bool {
        self.is_news_at(words, Instant::now())
    }

    fn is_news_at(&mut self, words: &str, now: Instant) -> bool {
        if self.said.iter().any(|said| said == words) {
            return false;
        }
        if self.said.len() == WORDS_MAX {
            if self.last.is_some_and(|last| now.duration_since(last) < RARELY) {
                return false;
            }
            self.said.pop_front();
        }
        self.said.push_back(words.into());
        self.last = Some(now);
        true
    }

    /// The matter is settled: whatever is said next is news.
    pub fn forget(&mut self) {
        *self = Self::default();
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

    /// As where each says how many bytes are free. Whatever else comes is told then, too, if late.
    #[test]
    fn words_that_never_come_again_are_said_a_few_times_and_rarely_from_then_on() {
        let (mut told, start) = (Told::default(), Instant::now());
        let mut news = |n: u64, after| told.is_news_at(&format!("{n} bytes are free"), start + after);
        assert_eq!((0..1000).filter(|n| news(*n, Duration::ZERO)).count(), WORDS_MAX);
        assert!(!news(1000, RARELY / 2));
        assert!(news(1001, RARELY) && !news(1002, RARELY), "one more, and no more than one");
        assert!(!news(15, RARELY * 2), "was said, and is remembered");
        told.forget();
        assert!(told.is_news("0 bytes are free"));
    }
}
