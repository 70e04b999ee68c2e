//! What is tried again and again fails again and again for the same reason: that is worth one line in the log.

/// The last words that were said of one matter.
#[derive(Debug, Default)]
pub(crate) struct Told(Option<String>);

impl Told {
    /// Whether `words` are others than the last ones. From now on they are the last.
    pub(crate) fn is_news(&mut self, words: &str) -> bool {
        let news = self.0.as_deref() != Some(words);
        if news {
            self.0 = Some(words.into());
        }
        news
    }

    /// The matter is settled: whatever is said next is news.
    pub(crate) fn forget(&mut self) {
        self.0 = None;
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
        assert!(told.is_news("no folder") && told.is_news("no room"));
        told.forget();
        assert!(told.is_news("no room"));
    }
}
