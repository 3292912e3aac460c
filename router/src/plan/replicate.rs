//! Hot entries get more holders: one that is used often and held by few is sent to one more combiner, in the background.
//!
//! Owns how often each entry was used lately, and the budget. Nothing is computed for it, a worker that holds the entry
//! sends it, and only to a combiner at which nobody waits; one that does not get there in time is given up. Keys are
//! salted, so what one tenant uses often says and does nothing about the entries of another. What can go wrong costs
//! bytes: an entry that cools down, or goes, on the way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hypic_cache::{EntryKey, PrefixChain};
use hypic_state::ComposeRule;
use hypic_telemetry::metrics;
use hypic_transport::{
    Combine, Delivery, JobError, JobOutcome, Plan, PlanChoice, PlanSegment, PrefillJob, SamplingParams, Scatter,
    SegmentBody, TransferId,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::Placer;
use crate::balance::Charge;
use crate::router::Core;

/// When entries get more holders.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReplicateConfig {
    /// Whether they do.
    pub enabled: bool,
    /// An entry is hot once its uses come to this, each counting less with time.
    pub uses: u32,
    /// A use counts for a factor e less after so long, so that `uses` in each such time keep an entry hot.
    #[serde(with = "humantime_serde")]
    pub window: Duration,
    /// Workers and combiners that shall hold a hot entry.
    pub copies: usize,
    /// Entries on their way at a time.
    pub concurrent: usize,
    /// After each one its place stays empty for so long.
    #[serde(with = "humantime_serde")]
    pub pause: Duration,
    /// One that is longer on its way is given up.
    #[serde(with = "humantime_serde")]
    pub limit: Duration,
    /// Entries whose uses are counted.
    pub tracked: usize,
}

impl Default for ReplicateConfig {
    fn default() -> Self {
        ReplicateConfig {
            enabled: true,
            uses: 8,
            window: Duration::from_secs(10),
            copies: 3,
            concurrent: 1,
            pause: Duration::from_millis(100),
            limit: Duration::from_secs(10),
            tracked: 16_384,
        }
    }
}

/// Uses of an entry, each worth less with time.
#[derive(Clone, Copy)]
struct Heat {
    uses: f64,
    at: Instant,
}

impl Heat {
    fn now(self, window: Duration) -> f64 {
        let windows = self.at.elapsed().as_secs_f64() / window.as_secs_f64().max(1e-3);
        self.uses * (-windows).exp()
    }
}

struct Heats {
    known: HashMap<EntryKey, Heat>,
    /// When those that have cooled down were last forgotten.
    cleared: Instant,
}

/// Which entries are hot, and the budget for sending them.
pub(crate) struct Replicator {
    config: ReplicateConfig,
    heats: Mutex<Option<Heats>>,
    places: Arc<Semaphore>,
}

impl Replicator {
    pub fn new(config: ReplicateConfig) -> Self {
        let places = Arc::new(Semaphore::new(config.concurrent.min(Semaphore::MAX_PERMITS)));
        Replicator { config, heats: Mutex::default(), places }
    }

    /// Count a use of each of `keys`; those that are hot now.
    fn used(&self, keys: impl Iterator<Item = EntryKey>) -> Vec<EntryKey> {
        let (now, window) = (Instant::now(), self.config.window);
        let mut heats = self.heats.lock();
        let heats = heats.get_or_insert_with(|| Heats { known: HashMap::new(), cleared: now });
        let mut hot = Vec::new();
        for key in keys {
            if heats.known.len() >= self.config.tracked && !heats.known.contains_key(&key) {
                // Rarely: it looks at all of them.
                if heats.cleared.elapsed() < window {
                    continue;
                }
                heats.cleared = now;
                heats.known.retain(|_, heat| heat.now(window) >= 1.0);
                if heats.known.len() >= self.config.tracked {
                    continue;
                }
            }
            let heat = heats.known.entry(key).or_insert(Heat { uses: 0.0, at: now });
            *heat = Heat { uses: heat.now(window) + 1.0, at: now };
            if heat.uses >= f64::from(self.config.uses) {
                hot.push(key);
            }
        }
        hot
    }

    /// An entry was dealt with: it has to become hot anew.
    fn cool(&self, key: EntryKey) {
        if let Some(heats) = &mut *self.heats.lock() {
            heats.known.remove(&key);
        }
    }
}

/// Whether entries may get more holders: that is wanted, and there is another combiner to hold them.
pub(crate) fn may_replicate(core: &Core) -> bool {
    core.replicator.config.enabled && core.fleet.view().combiners.iter().filter(|c| c.is_running()).nth(1).is_some()
}

/// Count the uses of a request's entries, and if one is hot and there is room in the budget, have it sent to one more
/// combiner. Returns at once. Needs a tokio runtime. Does nothing unless it [may](may_replicate).
pub(crate) fn replicate(core: &Arc<Core>, jobs: &[PrefillJob], chosen: &str) {
    let replicator = &core.replicator;
    if jobs.is_empty() || !may_replicate(core) {
        return;
    }
    let mut hot = replicator.used(jobs.iter().map(|job| job.key));
    if hot.len() > LOOKS {
        // Not always the same ones: there may be nothing to be done about those.
        let first = rand::random_range(0..hot.len());
        hot.rotate_left(first);
        hot.truncate(LOOKS);
    }
    if hot.is_empty() {
        return;
    }
    let placer = Placer::new(core, core.fleet.directory());
    for key in hot {
        let Ok(place) = replicator.places.clone().try_acquire_owned() else { return };
        let Some(job) = jobs.iter().find(|job| job.key == key) else { continue };
        match Errand::find(core, &placer, job, chosen) {
            Finding::Errand(errand) => {
                replicator.cool(key);
                tokio::spawn(errand.run(core.clone(), place));
            }
            Finding::Enough => replicator.cool(key),
            Finding::NotNow => {}
        }
    }
}

/// Hot entries that one request looks for a new holder of: it has better things to do.
const LOOKS: usize = 4;

/// What can be done about a hot entry.
enum Finding {
    Errand(Box<Errand>),
    /// It has holders enough.
    Enough,
    /// Nobody can send it, or has room for it.
    NotNow,
}

/// An entry, who sends it, and to whom.
struct Errand {
    job: PrefillJob,
    source: Arc<dyn Scatter>,
    target: Arc<dyn Combine>,
    charge: Option<Charge>,
}

impl Errand {
    /// `chosen` is the combiner of the request at hand: it gets the entry anyway.
    fn find(core: &Core, placer: &Placer<'_>, job: &PrefillJob, chosen: &str) -> Finding {
        let (directory, config) = (placer.directory(), &core.replicator.config);
        let holders = directory.holders(job.key);
        let combiners = &directory.view.combiners;
        let has = |i: usize| holders.combiners.contains(&i) || combiners[i].id() == chosen;
        let copies = holders.workers.len() + (0..combiners.len()).filter(|&i| has(i)).count();
        let all_busy = (0..combiners.len()).filter(|&i| has(i)).all(|i| combiners[i].load().waiting > 0);
        if copies >= config.copies && !all_busy {
            return Finding::Enough;
        }
        let idle = |i: &usize| !has(*i) && combiners[*i].is_running() && combiners[*i].load().waiting == 0;
        let target = (0..combiners.len()).filter(idle).min_by_key(|&i| combiners[i].load().sequences);
        let (Some(target), Some((sending, source))) = (target, placer.holder(job, &holders)) else {
            return Finding::NotNow;
        };
        let charge = core.fleet.balancer().charge_time(source.id(), sending);
        let (source, target) = (source.clone(), combiners[target].clone());
        let job = PrefillJob {
            to: Delivery { combiner: target.id().into(), transfer: TransferId::random() },
            held_only: true,
            request: format!("replica-{}", job.request).into(),
            deadline: std::time::Instant::now().checked_add(config.limit),
            cancel: CancellationToken::new(),
            ..job.clone()
        };
        Finding::Errand(Box::new(Errand { job, source, target, charge }))
    }

    async fn run(self, core: Arc<Core>, place: OwnedSemaphorePermit) {
        let cancelled = self.job.cancel.clone().drop_guard();
        let (tokens, key) = (self.job.tokens.len(), self.job.key);
        let (source, target) = (self.source.id(), self.target.id());
        // Kept until the end: the transfer is open for as long as the plan is.
        let (plan, _events) = opener(&core, &self.job);
        self.target.generate(plan);
        let began = Instant::now();
        let limit = core.replicator.config.limit;
        let sent: Result<JobOutcome, JobError> = match timeout(limit, self.source.prefill(self.job.clone())).await {
            Ok(sent) => sent,
            Err(_) => Err(JobError::Late(source.to_owned())),
        };
        match sent {
            Ok(outcome) if outcome.sent_bytes == 0 => debug!(%key, source, target, "a hot entry was there already"),
            Ok(outcome) => {
                info!(%key, source, target, "a hot entry has one more holder");
                if let Some(charge) = &self.charge {
                    charge.sent(tokens, outcome.sent_bytes, began.elapsed());
                }
                metrics().replication();
                metrics().transfer_bytes(outcome.sent_bytes);
            }
            Err(error) => debug!(%key, source, target, %error, "a hot entry was not sent"),
        }
        drop((cancelled, self));
        sleep(core.replicator.config.pause).await;
        drop(place);
    }
}

/// A plan that opens the transfer of a job, and of which nothing else is wanted: it ends when the job is cancelled.
fn opener(core: &Core, job: &PrefillJob) -> (Plan, mpsc::UnboundedReceiver<hypic_transport::GenerationEvent>) {
    let (events, told) = mpsc::unbounded_channel();
    let rule = ComposeRule::default();
    let body = SegmentBody::Entry { seam: job.seam, key: job.key, transfer: job.to.transfer, held: false };
    let plan = Plan {
        request: job.request.clone(),
        arrived: std::time::Instant::now(),
        resume: None,
        segments: vec![PlanSegment { tokens: job.tokens.clone(), body }],
        query: job.tokens[..1].to_vec(),
        rule,
        root: PrefixChain::new(&core.space, 0, rule, job.seam, &job.anchor, &job.salt).key(),
        saves: Vec::new(),
        choices: vec![PlanChoice {
            sampling: SamplingParams::default(),
            told: Vec::new(),
            cancel: job.cancel.child_token(),
        }],
        prompt_ids: Vec::new(),
        eos: Arc::new([]),
        max_tokens: 1,
        deadline: job.deadline,
        cancel: job.cancel.clone(),
        events,
    };
    (plan, told)
}

#[cfg(test)]
mod tests;
