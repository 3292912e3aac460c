//! Added tokens (special or not): which there are, and where a text holds them.
//!
//! Matching follows the `tokenizers` library (leftmost, longest, `single_word`, `lstrip`, `rstrip`), except that places
//! can be barred: what the client wrote is ordinary text. Tokens with `normalized` are matched by their normalized
//! form in the normalized text, the others in the text as it is.

use std::collections::HashMap;
use std::ops::Range;

use tokenizers::AddedToken;

/// Added tokens of one kind (normalized or not), indexed for matching.
#[derive(Clone, Debug, Default)]
pub(crate) struct AddedMatcher {
    by_content: HashMap<String, (u32, AddedToken)>,
    /// Byte lengths of the tokens that begin with this byte, longest first.
    lengths: HashMap<u8, Vec<usize>>,
}

impl AddedMatcher {
    /// `entries`: (the string to look for, id, flags).
    pub(crate) fn new(entries: impl IntoIterator<Item = (String, u32, AddedToken)>) -> Self {
        let mut matcher = Self::default();
        for (content, id, token) in entries {
            let Some(first) = content.bytes().next() else {
                continue;
            };
            let lengths = matcher.lengths.entry(first).or_default();
            if !lengths.contains(&content.len()) {
                lengths.push(content.len());
            }
            matcher.by_content.insert(content, (id, token));
        }
        matcher.lengths.values_mut().for_each(|lengths| lengths.sort_unstable_by(|a, b| b.cmp(a)));
        matcher
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_content.is_empty()
    }

    /// Matches in order, as (byte range, id); the range includes white space that the token strips. `allowed` is asked
    /// about the range without that white space.
    pub(crate) fn matches(&self, text: &str, allowed: impl Fn(Range<usize>) -> bool) -> Vec<(Range<usize>, u32)> {
        let mut found: Vec<(Range<usize>, u32)> = Vec::new();
        if self.is_empty() {
            return found;
        }
        let mut at = 0;
        while at < text.len() {
            let Some((end, id, token)) = self.longest_at(text, at, &allowed) else {
                at += 1;
                continue;
            };
            let free_from = found.last().map_or(0, |(range, _)| range.end);
            let inside_word = token.single_word && (ends_in_word(&text[..at]) || starts_with_word(&text[end..]));
            if inside_word {
                at = end;
                continue;
            }
            let start = if token.lstrip { text[..at].trim_end().len().max(free_from) } else { at };
            let stop = if token.rstrip { text.len() - text[end..].trim_start().len() } else { end };
            found.push((start..stop, id));
            at = stop;
        }
        found
    }

    fn longest_at(
        &self,
        text: &str,
        at: usize,
        allowed: &impl Fn(Range<usize>) -> bool,
    ) -> Option<(usize, u32, &AddedToken)> {
        let lengths = self.lengths.get(&text.as_bytes()[at])?;
        lengths.iter().find_map(|length| {
            let candidate = text.get(at..at + length)?;
            let (id, token) = self.by_content.get(candidate)?;
            allowed(at..at + length).then_some((at + length, *id, token))
        })
    }

    /// Every occurrence, overlapping ones too, in order of start; the longest of each start.
    pub(crate) fn occurrences(&self, text: &str) -> Vec<Range<usize>> {
        (0..text.len())
            .filter(|at| text.is_char_boundary(*at))
            .filter_map(|at| self.longest_at(text, at, &|_| true).map(|(end, ..)| at..end))
            .collect()
    }

    /// Whether a neighbour's text could complete an added token with the beginning (`at_start`) or the end of `text`.
    pub(crate) fn may_span_edge(&self, text: &str, at_start: bool) -> bool {
        self.by_content.keys().any(|content| {
            content.char_indices().skip(1).any(|(cut, _)| match at_start {
                true => text.starts_with(&content[cut..]),
                false => text.ends_with(&content[..cut]),
            })
        })
    }

    /// Whether `text` is a part of an added token, so that text on both sides could complete it.
    pub(crate) fn is_part_of_one(&self, text: &str) -> bool {
        self.by_content.keys().any(|content| content.contains(text))
    }
}

/// Whether one of the barriers (ascending, in half bytes) lies inside a match.
pub(crate) fn holds_barrier(range: &Range<usize>, barriers: &[usize]) -> bool {
    let next = barriers.partition_point(|barrier| *barrier <= 2 * range.start);
    barriers.get(next).is_some_and(|barrier| *barrier < 2 * range.end)
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn ends_in_word(text: &str) -> bool {
    text.chars().next_back().is_some_and(is_word)
}

fn starts_with_word(text: &str) -> bool {
    text.chars().next().is_some_and(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matcher(tokens: &[(&str, AddedToken)]) -> AddedMatcher {
        let entries = tokens.iter().enumerate();
        AddedMatcher::new(entries.map(|(id, (text, token))| (text.to_string(), id as u32, token.clone())))
    }

    fn plain(text: &str) -> (&str, AddedToken) {
        (text, AddedToken::from(text, true))
    }

    #[test]
    fn the_longest_match_at_a_place_wins_and_barred_places_do_not_match() {
        let matcher = matcher(&[plain("<a>"), plain("<a><b>"), plain("<b>")]);
        assert_eq!(matcher.matches("x<a><b><a>", |_| true), vec![(1..7, 1), (7..10, 0)]);
        let inside = [2 * 3];
        assert_eq!(matcher.matches("x<a><b>", |r| !holds_barrier(&r, &inside)), vec![(4..7, 2)]);
        let between = [2 * 4];
        assert_eq!(matcher.matches("x<a><b>", |r| !holds_barrier(&r, &between)), vec![(1..4, 0), (4..7, 2)]);
        let last_character = [2 * 6 + 1];
        assert_eq!(matcher.matches("x<a><b>", |r| !holds_barrier(&r, &last_character)), vec![(1..4, 0)]);
        assert_eq!(matcher.matches("é<b", |_| true), vec![]);
    }

    #[test]
    fn strips_and_single_words_follow_the_flags() {
        let strip = AddedToken::from("<m>", true).lstrip(true).rstrip(true);
        let word = AddedToken::from("no", false).single_word(true);
        let matcher = matcher(&[("<m>", strip), ("no", word)]);
        assert_eq!(matcher.matches("a  <m>\n b", |_| true), vec![(1..8, 0)]);
        assert_eq!(matcher.matches("no not", |_| true), vec![(0..2, 1)]);
    }

    #[test]
    fn edges_that_could_become_tokens_are_seen() {
        let matcher = matcher(&[plain("<|end|>")]);
        assert!(matcher.may_span_edge("text <|en", false));
        assert!(matcher.may_span_edge("|> text", true));
        assert!(!matcher.may_span_edge("text", true));
        assert!(matcher.is_part_of_one("en"));
    }
}
