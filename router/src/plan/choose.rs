//! Choosing the combiner: the one at which the prompt is done first, by what it has to do, what it holds of the prompt,
//! and what has to be made or sent. An estimate; a wrong one costs time.

use std::sync::Arc;
use std::time::Duration;

use hypic_text::Tokenized;
use hypic_transport::{Combine, PrefixHit};

use super::{Placer, SegmentKind, Settings};
use crate::balance::Speed;
use crate::directory::Holders;
use crate::router::Core;

/// A combiner and the state that a prompt would start from there.
pub(super) struct Start {
    pub combiner: Arc<dyn Combine>,
    /// Its place in the view.
    pub place: usize,
    pub resume: Option<PrefixHit>,
}

/// What a choice is made from.
pub(super) struct Choice<'a> {
    pub core: &'a Core,
    pub placer: &'a Placer<'a>,
    pub settings: &'a Settings,
    pub tokens: &'a Tokenized,
    /// Of each segment that has a body.
    pub holders: &'a [Option<Holders>],
}

/// What a segment costs that is not at the combiner.
#[derive(Clone, Copy, Default)]
struct Cost {
    sending: Duration,
    /// Zero if it need not be computed.
    computing: Duration,
}

impl Choice<'_> {
    /// The start by which the prompt is done first, as far as can be told.
    pub fn choose(&self, mut starts: Vec<Start>) -> Option<Start> {
        if starts.len() <= 1 {
            return starts.pop();
        }
        // The same for all combiners.
        let speed = self.core.fleet.balancer().speed();
        let segments = self.tokens.segments.iter().zip(self.holders);
        let costs: Vec<Cost> = segments.map(|(segment, holders)| self.cost(segment, holders, speed)).collect();
        let times: Vec<Duration> = starts.iter().map(|start| self.time(start, &costs, speed)).collect();
        let best = (0..starts.len()).min_by_key(|&i| times[i])?;
        Some(starts.swap_remove(best))
    }

    fn cost(&self, segment: &[u32], holders: &Option<Holders>, speed: Speed) -> Cost {
        let Some(holders) = holders else { return Cost::default() };
        let computing = if self.placer.is_held(holders) { Duration::ZERO } else { speed.time(segment.len()) };
        Cost { sending: self.core.fleet.balancer().sending_anywhere(segment.len()), computing }
    }

    fn time(&self, start: &Start, each: &[Cost], speed: Speed) -> Duration {
        let costs = &self.core.config.costs;
        let load = start.combiner.load();
        // What it tells may be a little old: this router's own plans are known better.
        let sequences = load.sequences.max(self.core.fleet.plans(start.combiner.id()).saturating_sub(load.waiting));
        let times = |time: Duration, n: usize| time.saturating_mul(u32::try_from(n).unwrap_or(u32::MAX));
        let queue = times(costs.waiting, load.waiting) + times(costs.sequence, sequences);

        let from = start.resume.as_ref().map_or(0, |hit| hit.tokens);
        let (mut at, mut rows) = (0, 0);
        let (mut longest, mut work, mut sent) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        for (index, segment) in self.tokens.segments.iter().enumerate() {
            let covered = from.saturating_sub(at).min(segment.len());
            at += segment.len();
            let holders = match (SegmentKind::of(self.settings, segment.len(), covered), &self.holders[index]) {
                (SegmentKind::Composed { seam }, Some(holders)) => {
                    rows += seam;
                    holders
                }
                _ => {
                    rows += segment.len() - covered;
                    continue;
                }
            };
            if holders.combiners.contains(&start.place) {
                continue;
            }
            let Cost { sending, computing } = each[index];
            sent = sent.saturating_add(sending);
            work = work.saturating_add(computing);
            longest = longest.max(computing);
        }
        rows += self.tokens.query.len() - from.saturating_sub(at);
        let makespan = longest.max(work / u32::try_from(self.placer.workers().max(1)).unwrap_or(u32::MAX));
        // Parts travel while others are computed.
        queue.saturating_add(speed.time(rows)).saturating_add(makespan.max(sent))
    }
}
