//! A prompt on its way through its passes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hypic_cache::Waker;
use hypic_kernels::Backend;
use hypic_model::{Item, Jump, Logits, Pass, RunningState, Sequence, split_items};
use hypic_transport::{CombineError, Incoming, Plan, SavePoint, SegmentBody};

use crate::device::Setup;

/// A prefix state that a prompt is to leave.
pub(crate) struct Save {
    pub point: SavePoint,
    /// Leading tokens of which every row is ordinary.
    pub exact: usize,
}

/// One prompt, between its first pass and its first token.
pub(crate) struct Prompt<B: Backend> {
    /// Whose.
    pub request: u64,
    /// Passes to come.
    passes: VecDeque<Vec<Item<B>>>,
    /// The one under way.
    pub pass: Option<Pass<B>>,
    /// The state between passes.
    state: Option<RunningState<B>>,
    /// States still to be kept, in order.
    pub saves: VecDeque<Save>,
    /// The device's time so far.
    pub busy: Duration,
    pub begun: bool,
}

impl<B: Backend> Prompt<B> {
    /// The passes that carry out `plan`. `transfers` are those of its segments; `waker` is called when parts arrive.
    pub fn new(
        request: u64,
        plan: &Plan,
        transfers: Vec<Option<Incoming<B>>>,
        setup: &Setup<B>,
        waker: &Waker,
        chunk_rows: usize,
    ) -> Result<Self, CombineError> {
        let (backend, model) = (&setup.backend, &setup.model);
        let covered = plan.resume.as_ref().map_or(0, |hit| hit.tokens);
        let tokens = covered + plan.segments.iter().map(|s| s.tokens.len()).sum::<usize>() + plan.query.len();
        check_reuse(plan, tokens, model.spec().reusable())?;
        let state = match &plan.resume {
            Some(hit) => {
                let (_, state) = setup.store.longest_prefix([hit.key]).ok_or(CombineError::StalePrefix)?;
                RunningState::resume(backend, model, &state.frozen)
            }
            None => RunningState::new(backend, model, 0),
        };
        let state = state.of_prompt(tokens);
        let mut items = Items::new(plan);
        for (segment, incoming) in plan.segments.iter().zip(transfers) {
            match segment.body {
                SegmentBody::Rows => items.rows(&segment.tokens),
                SegmentBody::Entry { seam, .. } => {
                    let origin = items.position as i64;
                    items.rows(&segment.tokens[..seam]);
                    let source = incoming.expect("a transfer for each entry");
                    source.listen(waker.clone());
                    let tokens = segment.tokens.len() - seam;
                    items.jump(Jump { source: Arc::new(source), tokens, origin, rule: plan.rule });
                }
            }
        }
        items.rows(&plan.query);
        // Several answers go on from one state.
        if plan.choices.len() > 1 {
            items.items.push(Item::Save);
        }
        let Items { items, saves, .. } = items;
        let passes = split_items(items, chunk_rows).into();
        Ok(Prompt { request, passes, pass: None, state: Some(state), saves, busy: Duration::ZERO, begun: false })
    }

    /// Begin the next pass, if none is under way.
    pub fn next_pass(&mut self) {
        if self.pass.is_some() {
            return;
        }
        let items = self.passes.pop_front().expect("a prompt ends with its last pass");
        let state = self.state.take().expect("a state between passes");
        let logits = if self.passes.is_empty() { Logits::Last } else { Logits::None };
        self.pass = Some(Pass::new(vec![Sequence { state, items, capture: None, logits }]));
    }

    /// Keep the state for the next pass.
    pub fn put_back(&mut self, state: RunningState<B>) {
        self.state = Some(state);
    }

    /// Whether the last pass has begun.
    pub fn is_last_pass(&self) -> bool {
        self.passes.is_empty()
    }

    /// Bytes of its state, while it lies between passes.
    pub fn state_bytes(&self) -> usize {
        self.state.as_ref().map_or(0, RunningState::bytes)
    }
}

/// What was computed for sequences of other lengths must be of use for a prompt of `tokens` tokens: routers see to it.
fn check_reuse(plan: &Plan, tokens: usize, reusable: Option<usize>) -> Result<(), CombineError> {
    let Some(limit) = reusable.filter(|&limit| tokens > limit) else { return Ok(()) };
    let rows_only = plan.segments.iter().all(|s| s.body == SegmentBody::Rows);
    if rows_only && plan.resume.is_none() && plan.saves.is_empty() {
        return Ok(());
    }
    let problem = format!(
        "a plan of {tokens} tokens reuses entries or prefix states, which this model's dynamic rope scaling allows up to {limit}"
    );
    Err(CombineError::Segment(problem))
}

/// Lays a plan out as items, with the saves where they belong.
struct Items<B: Backend> {
    items: Vec<Item<B>>,
    position: usize,
    /// Leading tokens of which every row is ordinary.
    exact: usize,
    to_come: VecDeque<SavePoint>,
    saves: VecDeque<Save>,
}

impl<B: Backend> Items<B> {
    fn new(plan: &Plan) -> Self {
        let (position, exact) = plan.resume.as_ref().map_or((0, 0), |hit| (hit.tokens, hit.exact));
        Items {
            items: Vec::new(),
            position,
            exact,
            to_come: plan.saves.iter().copied().collect(),
            saves: VecDeque::new(),
        }
    }

    fn rows(&mut self, mut tokens: &[u32]) {
        while !tokens.is_empty() {
            let until = self.to_come.front().map_or(usize::MAX, |s| s.position);
            let (now, later) = tokens.split_at(tokens.len().min(until.saturating_sub(self.position)));
            if !now.is_empty() {
                self.items.push(Item::Run(now.to_vec()));
                self.advance(now.len(), true);
            }
            tokens = later;
            self.save_here();
        }
        self.save_here();
    }

    fn jump(&mut self, jump: Jump<B>) {
        let tokens = jump.tokens;
        self.items.push(Item::Jump(jump));
        self.advance(tokens, false);
        self.save_here();
    }

    fn advance(&mut self, tokens: usize, ordinary: bool) {
        if ordinary && self.exact == self.position {
            self.exact += tokens;
        }
        self.position += tokens;
    }

    fn save_here(&mut self) {
        while let Some(point) = self.to_come.pop_front_if(|s| s.position <= self.position) {
            // A point inside a body cannot be kept; no plan has one.
            debug_assert_eq!(point.position, self.position);
            if point.position == self.position {
                self.items.push(Item::Save);
                self.saves.push_back(Save { point, exact: self.exact.min(point.position) });
            }
        }
    }
}
