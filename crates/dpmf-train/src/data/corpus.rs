//! Tokens of many users in one allocation.

/// Token sequences grouped by user, in three flat arrays.
///
/// Each example is a slice of at least two tokens: [`Vocabulary::BEGIN`](super::Vocabulary::BEGIN) and something to predict.
/// Each user has at least one example.
///
/// Cost: two bytes a token and a word an example and a user; looking up a user is two loads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Corpus {
    tokens: Vec<u16>,
    /// End of each example in `tokens`.
    example_ends: Vec<usize>,
    /// End of each user in `example_ends`.
    user_ends: Vec<usize>,
}

impl Corpus {
    /// Adds an example to the user under construction, written by `write` at the end of the token buffer.
    ///
    /// Returns whether it was kept: an example of fewer than two tokens predicts nothing and is taken back.
    pub fn push_example(&mut self, write: impl FnOnce(&mut Vec<u16>)) -> bool {
        let start = self.example_ends.last().copied().unwrap_or(0);
        debug_assert_eq!(start, self.tokens.len());
        write(&mut self.tokens);
        let kept = self.tokens.len() >= start + 2;
        if kept {
            self.example_ends.push(self.tokens.len());
        } else {
            self.tokens.truncate(start);
        }
        kept
    }

    /// Closes the user under construction.
    ///
    /// A user without examples is a user all the same: one whose data is taken away must leave the number of users, and
    /// with it everybody's cohort, as it was.
    pub fn finish_user(&mut self) {
        self.user_ends.push(self.example_ends.len());
    }

    /// Number of users.
    pub fn len(&self) -> usize {
        self.user_ends.len()
    }

    /// Whether there are no users.
    pub fn is_empty(&self) -> bool {
        self.user_ends.is_empty()
    }

    /// Number of examples of all users.
    pub fn example_count(&self) -> usize {
        self.user_ends.last().copied().unwrap_or(0)
    }

    /// Number of tokens to predict in all examples: every one but the first of each.
    pub fn prediction_count(&self) -> usize {
        let examples = self.example_count();
        if examples == 0 { 0 } else { self.example_ends[examples - 1] - examples }
    }

    /// Examples of one user.
    ///
    /// # Panics
    /// If `user` is not below [`len`](Self::len).
    pub fn examples_of(&self, user: usize) -> impl ExactSizeIterator<Item = &[u16]> {
        let first = if user == 0 { 0 } else { self.user_ends[user - 1] };
        (first..self.user_ends[user]).map(|example| {
            let start = if example == 0 { 0 } else { self.example_ends[example - 1] };
            &self.tokens[start..self.example_ends[example]]
        })
    }

    /// Keeps the first `users` users; as the order is a hash, they are a random sample.
    pub fn truncate(&mut self, users: usize) {
        if users >= self.len() {
            return;
        }
        self.user_ends.truncate(users);
        self.example_ends.truncate(self.example_count());
        self.tokens.truncate(self.example_ends.last().copied().unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus() -> Corpus {
        let mut corpus = Corpus::default();
        for user in [&[&[0, 5, 1][..], &[0, 1]][..], &[&[0, 7, 8, 9]], &[&[0, 3], &[0, 4], &[0, 5]]] {
            for example in user {
                assert!(corpus.push_example(|tokens| tokens.extend_from_slice(example)));
            }
            corpus.finish_user();
        }
        corpus
    }

    #[test]
    fn slices_are_what_was_pushed() {
        let corpus = corpus();
        assert_eq!(corpus.examples_of(0).collect::<Vec<_>>(), [&[0, 5, 1][..], &[0, 1]]);
        assert_eq!(corpus.examples_of(1).collect::<Vec<_>>(), [&[0, 7, 8, 9][..]]);
        assert_eq!(corpus.examples_of(2).len(), 3);
        assert_eq!(
            (corpus.len(), corpus.example_count(), corpus.prediction_count()),
            (3, 6, 2 + 1 + 3 + 1 + 1 + 1)
        );
    }

    #[test]
    fn examples_that_predict_nothing_leave_no_trace_and_users_without_examples_stay() {
        let mut corpus = corpus();
        let before = corpus.clone();
        assert!(!corpus.push_example(|_| ()));
        assert!(!corpus.push_example(|tokens| tokens.push(0)));
        assert_eq!(corpus, before);
        corpus.finish_user();
        assert_eq!((corpus.len(), corpus.example_count()), (before.len() + 1, before.example_count()));
        assert_eq!(corpus.examples_of(before.len()).len(), 0);
        assert_eq!(Corpus::default().prediction_count(), 0);
    }

    #[test]
    fn truncation_equals_building_fewer() {
        let mut short = corpus();
        short.truncate(2);
        assert_eq!((short.len(), short.example_count(), short.prediction_count()), (2, 3, 6));
        assert_eq!(short.examples_of(1).collect::<Vec<_>>(), [&[0, 7, 8, 9][..]]);
        assert!(short.push_example(|tokens| tokens.extend([0, 2])));
        short.finish_user();
        assert_eq!(short.examples_of(2).collect::<Vec<_>>(), [&[0, 2][..]]);
        let mut whole = corpus();
        whole.truncate(3);
        assert_eq!(whole, corpus());
        whole.truncate(0);
        assert_eq!(whole, Corpus::default());
    }
}
