//! One plan at one combiner. A request has one, and another one for each combiner that it loses; dropping a round cancels
//! its plan and its jobs.

use std::sync::Arc;

use hypic_telemetry::{Stage, metrics};
use hypic_text::Tokenized;
use hypic_transport::{Combine, GenerationEvent, PlanChoice, PrefillJob, PrefixHit, SamplingParams};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::jobs::Jobs;
use super::text::TextSide;
use crate::fleet::Occupied;
use crate::plan::{Avoid, Origin, Planned, PlannedSegment, Planner, Settings, may_replicate, replicate};
use crate::router::Core;

/// All that a plan is made of, kept for the case that it has to be made again.
pub(crate) struct Ask {
    pub settings: Settings,
    pub tokens: Tokenized,
    /// All token ids of the prompt, if a penalty asks for them.
    pub prompt_ids: Vec<u32>,
    /// One per choice, seeds drawn.
    pub choices: Vec<SamplingParams>,
    pub eos: Arc<[u32]>,
    pub max_tokens: usize,
    pub arrived: std::time::Instant,
}

/// A plan under way.
pub(super) struct Round {
    pub combiner: Arc<dyn Combine>,
    pub events: mpsc::UnboundedReceiver<GenerationEvent>,
    pub jobs: Jobs,
    pub segments: Vec<PlannedSegment>,
    pub resume: Option<PrefixHit>,
    /// Tokens of the query, and those of them that are rows.
    pub query: (usize, usize),
    /// Tokens of the prompt that are done.
    pub done: usize,
    /// Ends single choices.
    pub cancel_choice: Vec<CancellationToken>,
    _occupied: Occupied,
    /// Ends all of it.
    pub cancel: CancellationToken,
    _cancel: DropGuard,
}

impl Round {
    /// Plan `ask` and hand it out; `None` if there is no combiner for it. `told` are the tokens of each choice that the
    /// client has already.
    pub fn start(
        core: &Arc<Core>,
        ask: &Ask,
        avoid: &Avoid,
        told: &[Vec<u32>],
        text: &TextSide,
        cancel: &CancellationToken,
    ) -> Option<Self> {
        let cancel = cancel.child_token();
        let before = std::time::Instant::now();
        let planned = Planner { core }.plan(&ask.settings, &ask.tokens, avoid, &cancel)?;
        metrics().stage(Stage::Plan, before.elapsed());
        let Planned { combiner, mut plan, wanted, segments, query, .. } = planned;
        let choice = |(i, sampling): (usize, &SamplingParams)| {
            let cancel = cancel.child_token();
            if text.is_finished(i) {
                cancel.cancel();
            }
            PlanChoice { sampling: sampling.clone(), told: told[i].clone(), cancel }
        };
        plan.choices = ask.choices.iter().enumerate().map(choice).collect();
        plan.arrived = ask.arrived;
        plan.max_tokens = ask.max_tokens;
        plan.eos = ask.eos.clone();
        plan.prompt_ids = ask.prompt_ids.clone();
        let (sender, events) = mpsc::unbounded_channel();
        plan.events = sender;

        let held = wanted.iter().filter(|w| matches!(w.from, Origin::Combiner));
        let held: usize = held.map(|w| w.job.tokens.len() - w.job.seam).sum();
        let (resume, rows) = (plan.resume, plan.query.len());
        let cancel_choice = plan.choices.iter().map(|c| c.cancel.clone()).collect();
        let occupied = core.fleet.occupy(combiner.id());
        // First the plan: it opens the transfers that the jobs send to.
        combiner.generate(plan);
        let uses: Vec<PrefillJob> =
            if may_replicate(core) { wanted.iter().map(|wanted| wanted.job.clone()).collect() } else { Vec::new() };
        let jobs = Jobs::start(core.clone(), combiner.clone(), wanted, cancel.clone());
        // Last: nothing of the request waits for it.
        replicate(core, &uses, combiner.id());
        Some(Round {
            combiner,
            events,
            jobs,
            segments,
            resume,
            query: (query, rows),
            done: resume.map_or(0, |hit| hit.tokens) + held,
            cancel_choice,
            _occupied: occupied,
            _cancel: cancel.clone().drop_guard(),
            cancel,
        })
    }
}
