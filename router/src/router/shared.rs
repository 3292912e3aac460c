//! What all requests of a router share: its settings, what is served, and the state that outlives a request. Owns no task;
//! nothing here can fail.

use std::sync::Arc;

use hypic_cache::KeySpace;
use hypic_state::ComposeRule;
use hypic_telemetry::{BreakerState, Open};

use crate::api::{Anchor, ModelCard, Sampling};
use crate::breaker::Breakers;
use crate::budget::Budget;
use crate::faults::FaultConfig;
use crate::fleet::Fleet;
use crate::flights::Flights;
use crate::plan::{PlanCosts, ReplicateConfig, Replicator};

/// Settings of a router.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// Width of the seam unless a request names one.
    pub seam: usize,
    /// The anchor unless a request names one.
    pub anchor: Anchor,
    /// Share of the cache that the states of one prompt's earlier boundaries may take.
    pub boundary_share: f64,
    /// Bytes of token ids of texts that were encoded before; 0 remembers none.
    pub memo_bytes: usize,
    /// Events that a slow client may lag behind.
    pub event_buffer: usize,
    /// What work is reckoned to cost.
    pub costs: PlanCosts,
    /// What is done about failures.
    pub faults: FaultConfig,
    /// When entries get more holders.
    pub replicate: ReplicateConfig,
}

impl Default for RouterConfig {
    fn default() -> Self {
        RouterConfig {
            seam: 8,
            anchor: Anchor::Turn,
            boundary_share: 0.125,
            memo_bytes: 64 << 20,
            event_buffer: 64,
            costs: PlanCosts::default(),
            faults: FaultConfig::default(),
            replicate: ReplicateConfig::default(),
        }
    }
}

/// What a router knows of the model that its workers and combiners serve.
#[derive(Clone, Debug)]
pub struct Served {
    /// What clients are told.
    pub card: ModelCard,
    /// What all keys have in common.
    pub space: KeySpace,
    /// Rows of the embedding: token ids are below it.
    pub vocab: usize,
    /// Tokens of a prompt up to which entries and prefix states can be used: beyond them, the model's rotary embeddings
    /// depend on the prompt's length. `None`: any number.
    pub reusable: Option<usize>,
    /// Rule of composition unless a request names one.
    pub compose: ComposeRule,
    /// Tokens that end an answer.
    pub eos: Arc<[u32]>,
    /// Sampling unless a request says otherwise: the model's own, on top of OpenAI's.
    pub sampling: Sampling,
}

/// What all requests of a router share.
pub(crate) struct Core {
    pub config: RouterConfig,
    pub space: KeySpace,
    pub fleet: Arc<Fleet>,
    pub flights: Flights,
    pub breakers: Breakers,
    pub budget: Budget,
    pub replicator: Replicator,
    /// Jobs that members have.
    pub jobs_out: Open,
}

impl Core {
    pub fn new(config: RouterConfig, space: KeySpace, fleet: Arc<Fleet>) -> Self {
        let (budget, replicator) = (Budget::new(&config.faults), Replicator::new(config.replicate.clone()));
        fleet.balancer().set_links(config.costs.links());
        Core {
            config,
            space,
            fleet,
            flights: Flights::default(),
            breakers: Breakers::default(),
            budget,
            replicator,
            jobs_out: Open::default(),
        }
    }

    /// Members whose breaker is in this state.
    pub fn breakers_in(&self, state: BreakerState) -> u64 {
        let view = self.fleet.view();
        let (open, trying) = self.breakers.open_and_trying(view.scatter.iter().map(|worker| worker.id()));
        match state {
            BreakerState::Closed => view.scatter.len() as u64 - open - trying,
            BreakerState::Open => open,
            BreakerState::HalfOpen => trying,
        }
    }
}
