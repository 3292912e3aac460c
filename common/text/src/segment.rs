//! Segmentation: the template is rendered around marked parts, and the rendering is cut at the marks.
//!
//! Two things must be known of the rendering: where the marked parts are, and which added tokens the template wrote
//! rather than the client. Both are read off a second rendering in which client text carries sentinels, and which is
//! believed only if it equals the plain rendering without them. Places for the sentinels are tried from the plainest
//! to the most careful (see [`Marking`]). Added tokens that the template looks for (`</think>` in an answer, which it
//! takes apart) are found by disguising them one by one, and stay visible to it (see [`Placement`]). If the template
//! treats disguised text otherwise in all ways, the rendering of the disguised text is the prompt: client text is ordinary text, to the template too. What can
//! go wrong: the template refuses the messages, or loses or rewrites a marked part.

use std::collections::HashSet;

use serde_json::{Map, Value as Json};

use crate::conversation::{MOST_ROLES, Shape, TemplateView, Turn, collect_strings, map_strings};
use crate::disguise::{Marking, Placement, Plan, Weaver, locator_place};
use crate::error::TextError;
use crate::prompt::{AddedTokens, ChatPrompt, Piece, RawPrompt, Segmented};
use crate::sentinel::{Reading, Sentinels, Sign};
use crate::tokenizer::Tokenizer;

/// Renders and cuts a chat prompt.
///
/// # Errors
/// When the template refuses the messages, or a marked part cannot be found in the rendering.
pub(crate) fn segment_chat(
    view: &TemplateView<'_>,
    tokenizer: &Tokenizer,
    prompt: &ChatPrompt,
) -> Result<Segmented, TextError> {
    check_separator(prompt.separator.as_deref())?;
    let turns = view.turns(prompt);
    let mut strings: Vec<&str> = turns.iter().flat_map(Turn::strings).collect();
    view.variables.values().for_each(|value| collect_strings(value, &mut strings));
    strings.push(view.template.source());
    let sentinels = Sentinels::absent_from(strings.into_iter())?;
    let marks = turns.iter().flat_map(|turn| &turn.leaves).map(|leaf| leaf.marks.len()).sum();
    let weaver = Weaver {
        sentinels: &sentinels,
        tokenizer: (!prompt.special_tokens).then_some(tokenizer),
        template_source: view.template.source(),
    };
    let segmenter = Segmenter { view, weaver, turns: &turns, marks };
    let found = segmenter.find()?;

    let lost = found.marks.len() < marks;
    if lost && prompt.separator.is_none() {
        return Err(TextError::template(
            "the chat template leaves out text that is marked as a segment: mark only parts that it shows, or send the \
             text in a user message",
        ));
    }
    Ok(found.into_segmented(marks > 0))
}

/// Cuts a prompt without a template. `leading_bos`: the BOS token that begins the prompt, a piece of its own before
/// segments, so that no segment's ids depend on its place.
///
/// # Errors
/// When the separator is empty.
pub(crate) fn segment_raw(prompt: &RawPrompt, leading_bos: Option<u32>) -> Result<Segmented, TextError> {
    check_separator(prompt.separator.as_deref())?;
    let piece = |text: &str| match prompt.special_tokens {
        true => Piece::trusted(text),
        false => Piece::ordinary(text),
    };
    let mut pieces: Vec<Piece> = prompt.segments.iter().map(|text| piece(text)).collect();
    match prompt.separator.as_deref() {
        Some(separator) => pieces.extend(prompt.query.split(separator).map(piece)),
        None => pieces.push(piece(&prompt.query)),
    }
    let mut query = pieces.pop().unwrap_or_default();
    if leading_bos.is_some() && pieces.is_empty() {
        query.leading_token = leading_bos;
    } else if leading_bos.is_some() {
        pieces.insert(0, Piece { leading_token: leading_bos, ..Piece::default() });
    }
    Ok(Segmented { segments: pieces, query, message_ends: Vec::new() })
}

fn check_separator(separator: Option<&str>) -> Result<(), TextError> {
    match separator {
        Some("") => Err(TextError::request("`separator` is empty: give its text, or leave it out")),
        _ => Ok(()),
    }
}

/// Ways to put marks at their own places, the plainest first.
const TEXTUAL: [Marking; 3] = [Marking::Exact, Marking::Trimmed, Marking::TrimmedParts];

struct Segmenter<'a> {
    view: &'a TemplateView<'a>,
    weaver: Weaver<'a>,
    turns: &'a [Turn],
    /// How many marks there are.
    marks: usize,
}

/// A rendering whose places are known.
struct Found {
    text: String,
    /// Byte offsets, ascending.
    marks: Vec<usize>,
    message_ends: Vec<usize>,
    barriers: Vec<usize>,
}

impl Segmenter<'_> {
    fn find(&self) -> Result<Found, TextError> {
        let plain = self.view.render_turns(self.turns)?;
        let nothing = HashSet::new();
        let hide_all = Plan {
            marking: Marking::None,
            ends: false,
            acted_upon: &nothing,
            in_assistant: Placement::Inside,
            elsewhere: Placement::Inside,
            only: None,
        };
        let acted_upon = self.acted_upon(&hide_all, &plain);
        let looks_at =
            |elsewhere| Plan { acted_upon: &acted_upon, in_assistant: Placement::Left, elsewhere, ..hide_all.clone() };
        let mut plans = vec![hide_all.clone()];
        if !acted_upon.is_empty() {
            plans.splice(..0, [looks_at(Placement::Edge), looks_at(Placement::Inside)]);
        }
        if let Some(found) = plans.iter().find_map(|plan| self.try_markings(plan, &plain)) {
            return Ok(found);
        }
        let disguised = self.weaver.sentinels.read(&self.render(&hide_all)?).text;
        self.try_markings(&hide_all, &disguised).ok_or_else(|| {
            TextError::template(
                "the chat template rewrites text that is marked as a segment, so the segments cannot be found in the \
                 rendering: send the prompt raw, with `segments` and a query",
            )
        })
    }

    fn try_markings(&self, plan: &Plan<'_>, expected: &str) -> Option<Found> {
        let attempt = |marking, ends| self.attempt(&Plan { marking, ends, ..plan.clone() }, expected);
        if self.marks == 0 {
            let with_ends = TEXTUAL.into_iter().find_map(|marking| attempt(marking, true));
            return with_ends.or_else(|| attempt(Marking::None, false));
        }
        let markings = TEXTUAL.into_iter().chain([Marking::Located]);
        markings.into_iter().find_map(|marking| attempt(marking, false))
    }

    /// The rendering under a plan, if it equals the expected one without its sentinels.
    fn attempt(&self, plan: &Plan<'_>, expected: &str) -> Option<Found> {
        // A template that raises an exception over a sentinel is one more that looks at the text.
        let reading = self.weaver.sentinels.read(&self.render(plan).ok()?);
        if reading.text != expected {
            return None;
        }
        let marks = match plan.marking {
            Marking::Located => self.located_marks(&reading)?,
            _ => reading.places_of(Sign::Mark),
        };
        let message_ends = if plan.ends { self.message_ends(&reading) } else { Vec::new() };
        Some(Found { marks, message_ends, barriers: reading.barriers(), text: reading.text })
    }

    fn render(&self, plan: &Plan<'_>) -> Result<String, TextError> {
        let messages = self.turns.iter().map(|turn| {
            turn.to_json(
                |kind, text| self.weaver.string(plan, turn, kind, text),
                |index, _| self.weaver.leaf(plan, turn, index),
            )
        });
        let messages = Json::Array(messages.collect());
        let disguise = |(name, value): (&String, &Json)| {
            (name.clone(), map_strings(value, &|text| self.weaver.variable(plan, text)))
        };
        let variables: Map<String, Json> = self.view.variables.iter().map(disguise).collect();
        self.view.render(&messages, &variables)
    }

    /// Added tokens in client text that the template looks for: those whose disguise changes the rendering.
    fn acted_upon(&self, hide_all: &Plan<'_>, plain: &str) -> HashSet<String> {
        let Some(tokenizer) = self.weaver.tokenizer else {
            return HashSet::new();
        };
        let strings = self.turns.iter().flat_map(Turn::strings);
        let tokens: HashSet<&str> = strings
            .flat_map(|text| tokenizer.added_in(text).into_iter().map(move |range| &text[range]))
            // The template can only look for what it names; this also bounds the number of renderings.
            .filter(|token| self.weaver.template_source.contains(token))
            .collect();
        let changes = |token: &&str| {
            let plan = Plan { only: Some(token), ..hide_all.clone() };
            let same = self.render(&plan).is_ok_and(|text| self.weaver.sentinels.read(&text).text == plain);
            !same
        };
        tokens.into_iter().filter(changes).map(str::to_owned).collect()
    }

    /// Marks by the locators of their contents; `None` when a content is not there as it was sent, or trimmed.
    fn located_marks(&self, reading: &Reading) -> Option<Vec<usize>> {
        let leaves = self.turns.iter().flat_map(|turn| &turn.leaves).filter(|leaf| !leaf.marks.is_empty());
        let leaves: Vec<_> = leaves.collect();
        let places = reading.places_of(Sign::Locator);
        if leaves.len() != places.len() {
            return None;
        }
        let mut marks = Vec::with_capacity(self.marks);
        for (leaf, place) in leaves.into_iter().zip(places) {
            let trimmed = leaf.trimmed();
            // Where the trimmed text begins, and what of the white space around it is there too.
            let start = place.checked_sub(locator_place(leaf) - trimmed.start)?;
            let rest = reading.text.get(start..)?;
            if !rest.starts_with(&leaf.text[trimmed.clone()]) {
                return None;
            }
            let leading = &leaf.text[..trimmed.start];
            let trailing = &leaf.text[trimmed.end..];
            let first = if reading.text[..start].ends_with(leading) { 0 } else { trimmed.start };
            let last = if rest[trimmed.len()..].starts_with(trailing) { leaf.text.len() } else { trimmed.end };
            marks.extend(leaf.marks.iter().map(|mark| start + (*mark).clamp(first, last) - trimmed.start));
        }
        marks.sort_unstable();
        Some(marks)
    }

    /// Where messages end: behind what the template writes after the last content of such a role.
    fn message_ends(&self, reading: &Reading) -> Vec<usize> {
        let end = self.weaver.sentinels.of(Sign::End).to_string();
        let view = TemplateView { add_generation_prompt: false, ..*self.view };
        let as_parts = view.strings_as_parts;
        let mut tails: Vec<(&str, String)> = Vec::new();
        for (index, turn) in self.turns.iter().enumerate() {
            let is_known = tails.iter().any(|(role, _)| *role == turn.role);
            if is_known || turn.shape == Shape::Null || tails.len() == MOST_ROLES {
                continue;
            }
            let before = self.turns[..index].iter().map(|turn| turn.with_text("x", as_parts));
            let probes: Vec<Turn> = before.chain([turn.with_text(&end, as_parts)]).collect();
            let rendering = view.render_turns(&probes).unwrap_or_default();
            let tail = rendering.rsplit_once(&end).map_or("", |(_, tail)| tail);
            tails.push((turn.role.as_str(), tail.to_owned()));
        }
        let after = |place: usize| {
            let rest = &reading.text[place..];
            let fitting = tails.iter().map(|(_, tail)| tail).filter(|tail| rest.starts_with(tail.as_str()));
            place + fitting.map(String::len).max().unwrap_or(0)
        };
        reading.places_of(Sign::End).into_iter().map(after).collect()
    }
}

impl Found {
    fn into_segmented(self, is_marked: bool) -> Segmented {
        let mut pieces = Vec::with_capacity(self.marks.len() + 1);
        let mut start = 0;
        for end in self.marks.iter().copied().chain(std::iter::once(self.text.len())) {
            pieces.push(self.piece(start..end));
            start = end;
        }
        let query = pieces.pop().unwrap_or_default();
        let message_ends = if is_marked { Vec::new() } else { self.message_ends };
        Segmented { segments: pieces, query, message_ends }
    }

    fn piece(&self, range: std::ops::Range<usize>) -> Piece {
        let first = self.barriers.partition_point(|barrier| *barrier <= 2 * range.start);
        let last = self.barriers.partition_point(|barrier| *barrier < 2 * range.end);
        let barriers = self.barriers[first..last.max(first)].iter().map(|barrier| barrier - 2 * range.start);
        Piece {
            added: AddedTokens::Outside(barriers.collect()),
            text: self.text[range].to_owned(),
            leading_token: None,
        }
    }
}
