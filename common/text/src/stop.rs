//! Stop strings over streamed text.
//!
//! The matcher is fed text in any cuts and gives back the same text up to the first stop: the match that starts
//! earliest wins. It holds back only text that can still become a stop; so a match that starts later waits while an
//! earlier start is still possible, and the result never depends on how the text was cut. What can go wrong: an empty
//! stop string, which is refused.

use crate::error::TextError;

/// What a piece of text brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopMatch {
    /// Text that can be sent now.
    pub text: String,
    /// The stop string that was met; nothing follows `text` then.
    pub stop: Option<String>,
}

/// Finds stop strings across the edges of streamed text.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopMatcher {
    /// A matcher for these stop strings; with none, all text passes.
    ///
    /// # Errors
    /// When a stop string is empty.
    pub fn new(stops: Vec<String>) -> Result<Self, TextError> {
        if stops.iter().any(String::is_empty) {
            return Err(TextError::request("`stop` holds an empty string: leave it out"));
        }
        let mut stops = stops;
        // Of two stops with the same start the shorter is complete first; the text before it is the same.
        stops.sort_by_key(String::len);
        Ok(Self { stops, held: String::new(), stopped: false })
    }

    /// Takes the next text. After a stop, all further text is dropped.
    pub fn push(&mut self, text: &str) -> StopMatch {
        if self.stopped {
            return StopMatch::default();
        }
        self.held.push_str(text);
        self.scan(true)
    }

    /// The end of the text: what was held back, up to a complete stop if there is one.
    pub fn finish(&mut self) -> StopMatch {
        if self.stopped {
            return StopMatch::default();
        }
        let outcome = self.scan(false);
        self.stopped = true;
        outcome
    }

    fn scan(&mut self, more_may_come: bool) -> StopMatch {
        for (start, _) in self.held.char_indices() {
            let rest = &self.held[start..];
            if let Some(stop) = self.stops.iter().find(|stop| rest.starts_with(stop.as_str())) {
                let stop = Some(stop.clone());
                self.stopped = true;
                self.held.truncate(start);
                return StopMatch { text: std::mem::take(&mut self.held), stop };
            }
            if more_may_come && self.stops.iter().any(|stop| stop.starts_with(rest)) {
                let held = self.held.split_off(start);
                return StopMatch { text: std::mem::replace(&mut self.held, held), stop: None };
            }
        }
        StopMatch { text: std::mem::take(&mut self.held), stop: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], cuts: &[&str]) -> (String, Option<String>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect()).unwrap();
        let mut text = String::new();
        for cut in cuts {
            let step = matcher.push(cut);
            text.push_str(&step.text);
            if step.stop.is_some() {
                assert_eq!(matcher.push("more"), StopMatch::default());
                return (text, step.stop);
            }
        }
        let last = matcher.finish();
        text.push_str(&last.text);
        (text, last.stop)
    }

    #[test]
    fn empty_stop_strings_are_refused() {
        let error = StopMatcher::new(vec!["a".into(), String::new()]).unwrap_err();
        assert!(error.to_string().contains("stop"), "{error}");
    }

    #[test]
    fn a_stop_is_found_across_edges_and_inside_multi_byte_text() {
        assert_eq!(run(&["END"], &["abE", "N", "Dxyz"]), ("ab".into(), Some("END".into())));
        assert_eq!(run(&["é→"], &["caf", "é", "→", "x"]), ("caf".into(), Some("é→".into())));
        assert_eq!(run(&["aab"], &["aa", "a", "b"]), ("a".into(), Some("aab".into())));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), None));
    }

    #[test]
    fn the_earliest_start_wins_and_an_abandoned_start_gives_way() {
        assert_eq!(run(&["bc", "abcd"], &["x", "abc", "d"]), ("x".into(), Some("abcd".into())));
        assert_eq!(run(&["bc", "abcd"], &["x", "abc", "z"]), ("xa".into(), Some("bc".into())));
        assert_eq!(run(&["bc", "abcd"], &["xabc"]), ("xa".into(), Some("bc".into())));
    }

    #[test]
    fn no_more_is_held_than_can_become_a_stop() {
        let mut matcher = StopMatcher::new(vec!["\n\nUser:".into()]).unwrap();
        assert_eq!(matcher.push("one\n").text, "one");
        assert_eq!(matcher.push("two").text, "\ntwo");
        assert_eq!(matcher.push("\n\nUs").text, "");
        assert_eq!(matcher.push("a").text, "\n\nUsa");
    }

    #[test]
    fn random_texts_stop_where_a_search_of_the_whole_text_says() {
        let mut random = 7u64;
        let mut next = move |below: usize| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) as usize % below
        };
        let alphabet = ["a", "b", "é", "→", "😀"];
        for _ in 0..3000 {
            let mut word = |longest: usize| -> String {
                let length = 1 + next(longest);
                (0..length).map(|_| alphabet[next(alphabet.len())]).collect()
            };
            let text = word(14);
            let stops: Vec<String> = (0..3).map(|_| word(4)).collect();
            let cuts: Vec<String> = text.chars().map(String::from).collect();
            let expected = stops.iter().filter_map(|stop| text.find(stop.as_str())).min();
            let by_char = run(
                &stops.iter().map(String::as_str).collect::<Vec<_>>(),
                &cuts.iter().map(String::as_str).collect::<Vec<_>>(),
            );
            let at_once = run(&stops.iter().map(String::as_str).collect::<Vec<_>>(), &[&text]);
            assert_eq!(by_char.0, text[..expected.unwrap_or(text.len())]);
            assert_eq!(by_char.1.is_some(), expected.is_some());
            assert_eq!(by_char.0, at_once.0, "{text} {stops:?}");
        }
    }
}
