//! Prefix states of a prompt: which keys they have, which one a combiner can start from, and which the prompt shall
//! leave. The chain of keys is computed once for all combiners. A state that a combiner does not have after all costs a
//! new plan.

use std::collections::HashMap;

use hypic_cache::{KeySpace, PrefixChain, PrefixKey, PrefixKind};
use hypic_state::ComposeRule;
use hypic_text::Tokenized;
use hypic_transport::{Combine, PrefixHit, SavePoint};

use super::Settings;
use crate::api::Mode;

/// The keys of a prompt's prefixes.
pub(super) struct Prefixes {
    pub root: PrefixKey,
    /// Where states may be left.
    points: Vec<Point>,
    /// The last point at which one may be.
    end: usize,
    keys: HashMap<usize, PrefixKey>,
    /// Per combiner the lengths of states that it may have for this prompt, longest first.
    lengths: Vec<Vec<usize>>,
}

impl Prefixes {
    pub fn new<'a>(
        space: &KeySpace,
        settings: &Settings,
        tokens: &Tokenized,
        combiners: impl ExactSizeIterator<Item = &'a dyn Combine>,
    ) -> Self {
        let anchor: &[u32] = if settings.mode == Mode::Hypic { &settings.anchor } else { &[] };
        let (rule, seam) = match settings.mode {
            Mode::Hypic => (settings.rule, settings.seam),
            Mode::Full | Mode::Prefix => (ComposeRule::default(), 0),
        };
        let tag = settings.mode.prefix_tag();
        let chain = PrefixChain::new(space, tag.unwrap_or_default(), rule, seam, anchor, &settings.salt);
        let root = chain.key();
        if tag.is_none() {
            let lengths = vec![Vec::new(); combiners.len()];
            return Prefixes { root, points: Vec::new(), end: 0, keys: HashMap::new(), lengths };
        }
        let (points, end) = points(tokens);
        let mut lengths: Vec<Vec<usize>> = combiners.map(|c| c.prefix_lengths(root)).collect();
        let wanted = points.iter().map(|p| p.position).chain(lengths.iter().flatten().copied());
        let keys = chain_keys(chain, settings.mode, tokens, wanted.collect());
        for lengths in &mut lengths {
            lengths.retain(|length| keys.contains_key(length));
            lengths.sort_unstable_by(|a, b| b.cmp(a));
        }
        Prefixes { root, points, end, keys, lengths }
    }

    /// The longest state that `combiner`, the one of this index, has for this prompt.
    pub fn resume(&self, index: usize, combiner: &dyn Combine, avoid: &[PrefixKey]) -> Option<PrefixHit> {
        let keys = self.lengths[index].iter().map(|length| self.keys[length]);
        let keys: Vec<PrefixKey> = keys.filter(|key| !avoid.contains(key)).collect();
        if keys.is_empty() { None } else { combiner.prefix(&keys) }
    }

    /// The states that the prompt leaves at `combiner` when it starts with `start` tokens. As many of the latest
    /// boundaries before the query as fit a `share` of its cache.
    pub fn saves(&self, combiner: &dyn Combine, share: f64, start: usize) -> Vec<SavePoint> {
        if self.points.is_empty() {
            return Vec::new();
        }
        let (bytes, budget) = combiner.prefix_room(self.end);
        if bytes > budget {
            return Vec::new();
        }
        let room = (budget as f64 * share) as usize / bytes.max(1);
        let boundaries = self.points.iter().filter(|p| p.kind == PrefixKind::Boundary).count();
        let mut surplus = boundaries.saturating_sub(room);
        let mut points = self.points.clone();
        points.retain(|p| {
            let thinned = p.kind == PrefixKind::Boundary && surplus > 0;
            surplus -= usize::from(thinned);
            !thinned
        });
        let save = |p: Point| {
            let key = *self.keys.get(&p.position)?;
            Some(SavePoint { position: p.position, key, kind: p.kind })
        };
        points.into_iter().filter(|p| p.position > start).filter_map(save).collect()
    }
}

/// Points at which a prompt can leave states: before the query, at its end (but for its last token, so that a repeated
/// prompt has a row to take logits from), and at earlier boundaries; and the last of them.
fn points(tokens: &Tokenized) -> (Vec<Point>, usize) {
    let mut at = 0;
    let mut points: Vec<Point> = Vec::new();
    for segment in &tokens.segments {
        at += segment.len();
        points.push(Point { position: at, kind: PrefixKind::Boundary });
    }
    if let Some(last) = points.last_mut() {
        last.kind = PrefixKind::Query;
    }
    points.extend(tokens.message_ends.iter().map(|end| Point { position: at + end, kind: PrefixKind::Boundary }));
    let end = at + tokens.query.len() - 1;
    points.retain(|p| p.position < end || p.kind == PrefixKind::Query);
    if end > 0 && points.last().is_none_or(|p| p.position < end) {
        points.push(Point { position: end, kind: PrefixKind::End });
    }
    (points, end)
}

#[derive(Clone, Copy)]
struct Point {
    position: usize,
    kind: PrefixKind,
}

/// The keys at the `wanted` positions at which the mode can have a state: in a composed prompt that is
/// between segments and within the query, else everywhere; and before the prompt's last token.
fn chain_keys(
    mut chain: PrefixChain,
    mode: Mode,
    tokens: &Tokenized,
    mut wanted: Vec<usize>,
) -> HashMap<usize, PrefixKey> {
    wanted.sort_unstable();
    wanted.dedup();
    let mut keys = HashMap::new();
    let mut wanted = wanted.into_iter().peekable();
    let mut at = 0;
    let mut rows = |chain: &mut PrefixChain, at: &mut usize, mut ids: &[u32], keep_end: bool| {
        let end = *at + ids.len();
        while let Some(position) = wanted.next_if(|p| *p < end || (keep_end && *p == end)) {
            if position < *at {
                continue;
            }
            let (before, behind) = ids.split_at(position - *at);
            chain.rows(before);
            keys.insert(position, chain.key());
            (ids, *at) = (behind, position);
        }
        chain.rows(ids);
        *at = end;
    };
    let mut composed = HashMap::new();
    for segment in &tokens.segments {
        match mode {
            Mode::Full | Mode::Prefix => rows(&mut chain, &mut at, segment, true),
            Mode::Hypic => {
                chain.segment(segment);
                at += segment.len();
                composed.insert(at, chain.key());
            }
        }
    }
    rows(&mut chain, &mut at, &tokens.query, false);
    keys.extend(composed);
    keys
}
