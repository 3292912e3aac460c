//! Where sentinels go into client text, so that no added token in it counts and segments can be found again.
//!
//! Any place may disturb a template that looks at the text; [`Plan`] says which places to try. What can go wrong is
//! noticed by the caller, who compares renderings.

use std::collections::HashSet;

use crate::conversation::{Leaf, StringKind, Turn};
use crate::sentinel::{Sentinels, Sign};
use crate::tokenizer::Tokenizer;

/// Roles that templates know; others are client text that may try to complete an added token.
const KNOWN_ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Where marks go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Marking {
    /// Nowhere: only the disguise.
    None,
    /// At their places.
    Exact,
    /// At their places, but not in the white space around a content, for templates that trim it.
    Trimmed,
    /// At their places, but not in the white space around a part, for templates that trim each.
    TrimmedParts,
    /// One locator in the middle of each content, for templates that look at the first or last characters.
    Located,
}

/// How one added token in client text is disguised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// After its first character: the template does not see it.
    Inside,
    /// Beside it, where it begins or ends the text: the template sees it there.
    Edge,
    /// Not at all: the template takes the text apart at it and writes its own.
    Left,
}

/// One way to place sentinels.
#[derive(Clone, Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) marking: Marking,
    pub(crate) ends: bool,
    /// Added tokens that the template looks for in contents.
    pub(crate) acted_upon: &'a HashSet<String>,
    /// For tokens that the template looks for, in the assistant's text and elsewhere.
    pub(crate) in_assistant: Placement,
    pub(crate) elsewhere: Placement,
    /// Disguise this token alone, to learn whether the template looks for it.
    pub(crate) only: Option<&'a str>,
}

/// Places sentinels in the strings of a request.
#[derive(Clone, Debug)]
pub(crate) struct Weaver<'a> {
    pub(crate) sentinels: &'a Sentinels,
    /// Whose added tokens to disguise; `None` when client text may write them.
    pub(crate) tokenizer: Option<&'a Tokenizer>,
    pub(crate) template_source: &'a str,
}

impl Weaver<'_> {
    /// A role, or a string in another field of a message of this turn.
    pub(crate) fn string(&self, plan: &Plan<'_>, turn: &Turn, kind: StringKind, text: &str) -> String {
        let mut places = self.disguise(plan, turn.is_assistant(), text);
        if kind == StringKind::Role {
            places.extend(self.role_barriers(text));
        } else {
            places.extend(self.edges(text));
        }
        self.sentinels.weave(text, places)
    }

    /// A string of the request outside the messages.
    pub(crate) fn variable(&self, plan: &Plan<'_>, text: &str) -> String {
        self.sentinels.weave(text, self.disguise(plan, false, text))
    }

    /// The text of a turn's content with this index.
    pub(crate) fn leaf(&self, plan: &Plan<'_>, turn: &Turn, index: usize) -> String {
        let leaf = &turn.leaves[index];
        let mut places = self.disguise(plan, turn.is_assistant(), &leaf.text);
        if plan.only.is_none() {
            places.extend(self.edges(&leaf.text));
        }
        let is_last = index + 1 == turn.leaves.len();
        let ends_here = plan.ends && is_last && !leaf.text.trim().is_empty();
        match plan.marking {
            Marking::None => {}
            Marking::Located if leaf.marks.is_empty() => {}
            Marking::Located => places.push((locator_place(leaf), Sign::Locator)),
            Marking::Exact | Marking::Trimmed | Marking::TrimmedParts => {
                places.extend(leaf.marks.iter().map(|mark| (*mark, Sign::Mark)));
                places.extend(ends_here.then_some((leaf.text.len(), Sign::End)));
            }
        }
        match plan.marking {
            Marking::Trimmed => move_off_edges(turn, index, &mut places),
            Marking::TrimmedParts => clamp(&mut places, leaf.trimmed()),
            Marking::None | Marking::Exact | Marking::Located => {}
        }
        self.sentinels.weave(&leaf.text, places)
    }

    fn disguise(&self, plan: &Plan<'_>, is_assistant: bool, text: &str) -> Vec<(usize, Sign)> {
        let Some(tokenizer) = self.tokenizer else {
            return Vec::new();
        };
        let start_of_text = text.len() - text.trim_start().len();
        let end_of_text = text.trim_end().len();
        let place = |range: std::ops::Range<usize>| {
            let token = &text[range.clone()];
            let first_character = token.chars().next().map_or(0, char::len_utf8);
            let hidden = match first_character == token.len() {
                true => (range.end, Sign::After),
                false => (range.start + first_character, Sign::Inside),
            };
            match plan.placement(token, is_assistant) {
                Placement::Left => None,
                Placement::Edge if range.start == start_of_text => Some((range.end, Sign::After)),
                Placement::Edge if range.end == end_of_text => Some((range.start, Sign::Before)),
                Placement::Inside | Placement::Edge => Some(hidden),
            }
        };
        tokenizer.added_in(text).into_iter().filter_map(place).collect()
    }

    /// Barriers where the neighbours of a text could complete an added token with its beginning or end.
    fn edges(&self, text: &str) -> Vec<(usize, Sign)> {
        let Some(added) = self.tokenizer.map(|tokenizer| &tokenizer.contents) else {
            return Vec::new();
        };
        let mut places = Vec::new();
        let inner = text.trim();
        if inner.is_empty() {
            return places;
        }
        let start = text.len() - text.trim_start().len();
        if added.may_span_edge(inner, true) {
            places.push((start, Sign::Inside));
        }
        if added.may_span_edge(inner, false) {
            places.push((start + inner.len(), Sign::Inside));
        }
        if added.is_part_of_one(inner) {
            places.push((start, Sign::Before));
        }
        places
    }

    /// Templates write `<|` role `|>`; that makes an added token of roles they know, and of no others.
    fn role_barriers(&self, role: &str) -> Vec<(usize, Sign)> {
        let named = || {
            let quoted = ["'", "\""].map(|quote| format!("{quote}{role}{quote}"));
            quoted.iter().any(|literal| self.template_source.contains(literal))
        };
        let Some(tokenizer) = self.tokenizer else {
            return Vec::new();
        };
        if role.is_empty() || KNOWN_ROLES.contains(&role) || named() {
            return Vec::new();
        }
        let added = &tokenizer.contents;
        let risky = added.is_part_of_one(role) || added.may_span_edge(role, true) || added.may_span_edge(role, false);
        if risky { vec![(0, Sign::Before), (role.len(), Sign::After)] } else { Vec::new() }
    }
}

/// Moves places out of the white space around a whole content, which may reach over several of its parts.
fn move_off_edges(turn: &Turn, index: usize, places: &mut Vec<(usize, Sign)>) {
    let leaves = &turn.leaves;
    let is_text = |leaf: &Leaf| !leaf.text.trim().is_empty();
    let (Some(first), Some(last)) = (leaves.iter().position(is_text), leaves.iter().rposition(is_text)) else {
        return clamp(places, 0..0);
    };
    if index < first || index > last {
        return places.clear();
    }
    let leaf = &leaves[index];
    let trimmed = leaf.trimmed();
    let start = if index == first { trimmed.start } else { 0 };
    let end = if index == last { trimmed.end } else { leaf.text.len() };
    clamp(places, start..end);
    let marks_of = |leaves: &[Leaf]| leaves.iter().map(|leaf| leaf.marks.len()).sum::<usize>();
    if index == first {
        places.extend(std::iter::repeat_n((start, Sign::Mark), marks_of(&leaves[..first])));
    }
    if index == last {
        places.extend(std::iter::repeat_n((end, Sign::Mark), marks_of(&leaves[last + 1..])));
    }
}

fn clamp(places: &mut [(usize, Sign)], range: std::ops::Range<usize>) {
    places.iter_mut().for_each(|(place, _)| *place = (*place).clamp(range.start, range.end));
}

impl Plan<'_> {
    fn placement(&self, token: &str, is_assistant: bool) -> Placement {
        if let Some(only) = self.only {
            return if token == only { Placement::Inside } else { Placement::Left };
        }
        if !self.acted_upon.contains(token) {
            return Placement::Inside;
        }
        if is_assistant { self.in_assistant } else { self.elsewhere }
    }
}

/// The place of a content's locator: a character in the middle of what trimming leaves.
pub(crate) fn locator_place(leaf: &Leaf) -> usize {
    let trimmed = leaf.trimmed();
    let middle = trimmed.start + trimmed.len() / 2;
    (0..=middle).rev().find(|place| leaf.text.is_char_boundary(*place)).unwrap_or(0)
}
