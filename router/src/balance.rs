//! Which worker prefills which cold segment: longest estimated time first, each to the worker that would finish it
//! first (LPT, Graham 1969; on workers of equal speed within 4/3 - 1/(3m) of the best makespan on m workers).
//!
//! Owns each worker's backlog (estimated time of the work that it was given and has not finished) and its speed as
//! measured, computing and sending: what a worker computes leaves it while it computes, so a segment takes the longer of
//! both. A backlog is the sum of [`Charge`] guards: it goes down exactly once for every guard, by just what the
//! guard added, whether the work is completed, fails, is cancelled or panics. On top comes what the worker tells that it
//! has to do for others. What can go wrong: there may be no worker to assign to, which is a typed error; estimates may be
//! off, which costs time and corrects itself as jobs complete.

mod charge;
mod link;
mod others;
mod speed;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hypic_transport::ToldBacklog;
use parking_lot::Mutex;

pub use charge::Charge;
pub use link::LinkConfig;
use link::{Link, Sizes};
use others::Others;
use speed::SpeedModel;
pub use speed::{Speed, SpeedConfig};

/// A worker's name: what reports and errors call it, and stable for as long as it lives.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(Arc<str>);

impl WorkerId {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<T: Into<Arc<str>>> From<T> for WorkerId {
    fn from(name: T) -> Self {
        WorkerId(name.into())
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why segments cannot be assigned, or a worker not be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BalanceError {
    /// No worker is known, or all are excluded.
    #[error("no worker to prefill {segments} segments: {known} known, {excluded} of them excluded; start a worker")]
    NoWorker {
        /// Segments that were to be assigned.
        segments: usize,
        /// Workers known.
        known: usize,
        /// Known workers that the caller excluded.
        excluded: usize,
    },
    /// A worker of this name is known already.
    #[error("worker '{0}' is known already: remove it first, or give the new one another name")]
    DuplicateWorker(WorkerId),
}

/// A segment's worker. The worker is charged for as long as `charge` lives.
#[derive(Debug)]
pub struct Assignment {
    /// Index of the segment in the list that was assigned.
    pub segment: usize,
    /// Who shall prefill it.
    pub worker: WorkerId,
    /// Estimated time of the prefill alone, without what the worker has to do before it.
    pub estimate: Duration,
    /// The guard of the worker's load.
    pub charge: Charge,
}

/// What is known of a worker at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerLoad {
    /// The worker.
    pub worker: WorkerId,
    /// Estimated time of the work that it was given and has not finished.
    pub backlog: Duration,
    /// Number of segments that it was given and has not finished.
    pub segments: usize,
    /// Estimated time of what it has to do for others, by its own word.
    pub others: Duration,
    /// Its speed: measured, else that of all workers together, else the configured one.
    pub speed: Speed,
    /// Completed segments that the speed was learned from.
    pub measured: u64,
    /// Bytes per second of its link: measured, else that of all workers together, else the configured one.
    pub bytes_per_second: f64,
}

/// A shared handle to all workers' loads; clones are the same balancer.
#[derive(Clone, Debug)]
pub struct Balancer {
    fleet: Arc<Mutex<Fleet>>,
}

#[derive(Debug)]
struct Fleet {
    config: SpeedConfig,
    links: LinkConfig,
    /// In the order in which they were added, which decides between equals. Never reused, so a worker that comes back
    /// under its old name is another one and owes nothing.
    workers: BTreeMap<Incarnation, Worker>,
    next: Incarnation,
    /// Learned from every completed job: the best guess for a worker that has not completed one.
    pooled: SpeedModel,
    pooled_link: Link,
    sizes: Sizes,
    /// Usual tokens of a segment; 0 until one was placed.
    usual: f64,
}

/// One life of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Incarnation(u64);

#[derive(Debug)]
struct Worker {
    id: WorkerId,
    /// Whole nanoseconds, so that taking away what was added leaves what was there.
    backlog: u128,
    segments: usize,
    /// Charges that it has ever had: tells whether one was alone.
    charges: u64,
    others: Others,
    model: SpeedModel,
    link: Link,
}

fn duration(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Balancer {
    /// A balancer without workers, whose links cost nothing.
    pub fn new(config: SpeedConfig) -> Self {
        let fleet = Fleet {
            pooled: SpeedModel::new(&config),
            config,
            links: LinkConfig::FREE,
            workers: BTreeMap::new(),
            next: Incarnation(0),
            pooled_link: Link::default(),
            sizes: Sizes::default(),
            usual: 0.0,
        };
        Balancer { fleet: Arc::new(Mutex::new(fleet)) }
    }

    /// What is expected of links until transfers have been seen. What was learned stays.
    pub fn set_links(&self, links: LinkConfig) {
        self.fleet.lock().links = links;
    }

    /// Make a worker known, idle.
    ///
    /// # Errors
    /// If a worker of this name is known already.
    pub fn add_worker(&self, worker: impl Into<WorkerId>) -> Result<(), BalanceError> {
        let id = worker.into();
        let mut fleet = self.fleet.lock();
        if fleet.workers.values().any(|worker| worker.id == id) {
            return Err(BalanceError::DuplicateWorker(id));
        }
        let incarnation = fleet.next;
        fleet.next = Incarnation(incarnation.0 + 1);
        let model = SpeedModel::new(&fleet.config);
        let (others, link) = (Others::default(), Link::default());
        fleet.workers.insert(incarnation, Worker { id, backlog: 0, segments: 0, charges: 0, others, model, link });
        Ok(())
    }

    /// Whom to ask what a worker told last of its backlog: `told` must not block, and must not use this balancer. While
    /// there is nobody to ask or it gives nothing, a worker has to do what it was given here and nothing else. False if the
    /// worker is not known.
    pub fn ask_backlog(&self, worker: &str, told: impl Fn() -> Option<ToldBacklog> + Send + Sync + 'static) -> bool {
        let mut fleet = self.fleet.lock();
        let known = fleet.workers.values_mut().find(|known| known.id.as_str() == worker);
        known.map(|known| known.others.ask(Arc::new(told))).is_some()
    }

    /// Forget a worker; its charges become inert. False if there is none of this name.
    pub fn remove_worker(&self, worker: &str) -> bool {
        let mut fleet = self.fleet.lock();
        let before = fleet.workers.len();
        fleet.workers.retain(|_, known| known.id.as_str() != worker);
        fleet.workers.len() < before
    }

    /// Assign segments, given their numbers of tokens, and charge the workers. The assignments come in the order in
    /// which a worker should take them up: longest first.
    ///
    /// # Errors
    /// If there is no worker; never for an empty list.
    pub fn assign(&self, tokens: &[usize]) -> Result<Vec<Assignment>, BalanceError> {
        self.assign_excluding(tokens, &[])
    }

    /// As [`Balancer::assign`], but not to these workers: for segments that a worker has failed to deliver.
    ///
    /// # Errors
    /// If no worker is left; never for an empty list.
    pub fn assign_excluding(&self, tokens: &[usize], excluded: &[WorkerId]) -> Result<Vec<Assignment>, BalanceError> {
        // The time grows with the tokens on every worker, so this is the order by estimated time whatever the speeds.
        let mut longest_first: Vec<usize> = (0..tokens.len()).collect();
        longest_first.sort_by_key(|&segment| std::cmp::Reverse(tokens[segment]));

        // One lock for all segments: concurrent requests must see each other's charges, or they choose the same worker.
        // Declared before the lock, because a charge that is dropped locks too.
        let mut placed = Vec::with_capacity(tokens.len());
        let mut fleet = self.fleet.lock();
        let others = if tokens.is_empty() { BTreeMap::new() } else { fleet.all_others() };
        for segment in longest_first {
            let Some((incarnation, nanos)) = fleet.first_to_finish(tokens[segment], excluded, &others) else {
                let known = fleet.workers.len();
                let excluded = fleet.workers.values().filter(|worker| excluded.contains(&worker.id)).count();
                debug_assert!(placed.is_empty(), "the choice of workers does not change under the lock");
                return Err(BalanceError::NoWorker { segments: tokens.len(), known, excluded });
            };
            let charge = Charge::begin(&self.fleet, &mut fleet, incarnation, tokens[segment], nanos);
            let worker = fleet.workers[&incarnation].id.clone();
            placed.push(Assignment { segment, worker, estimate: charge.estimate(), charge });
        }
        Ok(placed)
    }

    /// Estimated time of a prefill of `tokens` on a worker, without its backlog; `None` if the worker is not known.
    pub fn estimate(&self, worker: &str, tokens: usize) -> Option<Duration> {
        let fleet = self.fleet.lock();
        Some(fleet.time(fleet.worker(worker)?, tokens))
    }

    /// Estimated time for a worker to send what it holds, without its backlog: an entry of `bytes`, or one of `tokens` if
    /// its bytes are not known. `None` if the worker is not known.
    pub fn sending(&self, worker: &str, tokens: usize, bytes: Option<u64>) -> Option<Duration> {
        let fleet = self.fleet.lock();
        let bytes = bytes.map_or_else(|| fleet.sizes.bytes(tokens, &fleet.links), |bytes| bytes as f64);
        Some(fleet.moving(fleet.worker(worker)?, bytes))
    }

    /// Estimated time for some worker to send an entry of `tokens`.
    pub fn sending_anywhere(&self, tokens: usize) -> Duration {
        let fleet = self.fleet.lock();
        fleet.links.time(fleet.sizes.bytes(tokens, &fleet.links), fleet.pooled_rate())
    }

    /// An entry of `tokens` had so many bytes.
    pub fn sized(&self, tokens: usize, bytes: u64) {
        let fleet = &mut *self.fleet.lock();
        fleet.sizes.learn(tokens, bytes, &fleet.links);
    }

    /// Charge a worker with the prefill of a segment; `None` if it is not known.
    pub fn charge(&self, worker: &str, tokens: usize) -> Option<Charge> {
        self.charge_as(worker, tokens, |fleet, worker| fleet.time(worker, tokens))
    }

    /// Charge a worker with work that is no prefill and takes about `time`; nothing is learned from it. `None` if it is
    /// not known.
    pub fn charge_time(&self, worker: &str, time: Duration) -> Option<Charge> {
        self.charge_as(worker, 0, |_, _| time)
    }

    fn charge_as(&self, worker: &str, tokens: usize, time: impl Fn(&Fleet, &Worker) -> Duration) -> Option<Charge> {
        let mut fleet = self.fleet.lock();
        let (&incarnation, known) = fleet.workers.iter().find(|(_, known)| known.id.as_str() == worker)?;
        let nanos = u64::try_from(time(&fleet, known).as_nanos()).unwrap_or(u64::MAX);
        Some(Charge::begin(&self.fleet, &mut fleet, incarnation, tokens, nanos))
    }

    /// Estimated time of the work that a worker has, that for others included; `None` if it is not known.
    pub fn backlog(&self, worker: &str) -> Option<Duration> {
        let fleet = self.fleet.lock();
        let worker = fleet.worker(worker)?;
        Some(duration(worker.backlog.saturating_add(fleet.others(worker))))
    }

    /// Estimated time of the work that a worker has for others, by its own word; `None` if it is not known.
    pub fn others(&self, worker: &str) -> Option<Duration> {
        let fleet = self.fleet.lock();
        Some(duration(fleet.others(fleet.worker(worker)?)))
    }

    /// Estimated time of the work that all workers were given here together.
    pub fn whole_backlog(&self) -> Duration {
        duration(self.fleet.lock().workers.values().map(|worker| worker.backlog).sum::<u128>())
    }

    /// The least estimated time, backlog included, in which a worker that is not excluded would have a segment done.
    pub fn soonest(&self, tokens: usize, excluded: &[WorkerId]) -> Option<Duration> {
        let fleet = self.fleet.lock();
        let others = fleet.all_others();
        let (incarnation, nanos) = fleet.first_to_finish(tokens, excluded, &others)?;
        Some(duration(fleet.workers[&incarnation].backlog + others[&incarnation] + nanos as u128))
    }

    /// The speed of all workers together.
    pub fn speed(&self) -> Speed {
        self.fleet.lock().pooled.speed()
    }

    /// Whether any job was measured yet; until then all estimates are guesses.
    pub fn is_measured(&self) -> bool {
        self.fleet.lock().pooled.measured() > 0
    }

    /// Every worker's load, in the order in which they were added.
    pub fn loads(&self) -> Vec<WorkerLoad> {
        let fleet = self.fleet.lock();
        let load = |worker: &Worker| WorkerLoad {
            worker: worker.id.clone(),
            backlog: duration(worker.backlog),
            segments: worker.segments,
            others: duration(fleet.others(worker)),
            speed: fleet.speed(worker),
            measured: worker.model.measured(),
            bytes_per_second: fleet.rate(worker),
        };
        fleet.workers.values().map(load).collect()
    }
}

impl Fleet {
    fn worker(&self, id: &str) -> Option<&Worker> {
        self.workers.values().find(|known| known.id.as_str() == id)
    }

    /// Bytes per second of all links together.
    fn pooled_rate(&self) -> f64 {
        self.pooled_link.rate().unwrap_or(self.links.bytes_per_second)
    }

    /// Bytes per second of a worker's link.
    fn rate(&self, worker: &Worker) -> f64 {
        worker.link.faded(self.pooled_rate(), &self.links)
    }

    /// To have bytes sent by a worker.
    fn moving(&self, worker: &Worker, bytes: f64) -> Duration {
        self.links.time(bytes, self.rate(worker))
    }

    /// To have a segment computed by a worker and sent: parts leave while others are computed.
    fn time(&self, worker: &Worker, tokens: usize) -> Duration {
        let sending = self.moving(worker, self.sizes.bytes(tokens, &self.links));
        self.speed(worker).time(tokens).max(sending)
    }

    /// Nanoseconds of what a worker has to do for others. It tells a sum of tokens: they are taken for segments of the
    /// usual length, because a long one takes more than in proportion.
    fn others(&self, worker: &Worker) -> u128 {
        let tokens = worker.others.tokens();
        if tokens == 0 {
            return 0;
        }
        let usual = if self.usual > 0.0 { (self.usual.round().max(1.0) as u64).min(tokens) } else { tokens };
        let each = self.speed(worker).time(usize::try_from(usual).unwrap_or(usize::MAX));
        each.as_nanos().saturating_mul(u128::from(tokens)) / u128::from(usual)
    }

    /// The same of every worker. Asked once for many segments: what they are given meanwhile is not what others gave.
    fn all_others(&self) -> BTreeMap<Incarnation, u128> {
        self.workers.iter().map(|(&incarnation, worker)| (incarnation, self.others(worker))).collect()
    }

    fn speed(&self, worker: &Worker) -> Speed {
        let model = if worker.model.measured() > 0 { &worker.model } else { &self.pooled };
        model.speed()
    }

    /// The worker that would finish a segment first, and the nanoseconds that it takes there.
    fn first_to_finish(
        &self,
        tokens: usize,
        excluded: &[WorkerId],
        others: &BTreeMap<Incarnation, u128>,
    ) -> Option<(Incarnation, u64)> {
        let candidates = self.workers.iter().filter(|(_, worker)| !excluded.contains(&worker.id));
        let finishes = candidates.map(|(&incarnation, worker)| {
            let nanos = u64::try_from(self.time(worker, tokens).as_nanos()).unwrap_or(u64::MAX);
            let before = worker.backlog + others.get(&incarnation).copied().unwrap_or_default();
            (before + nanos as u128, incarnation, nanos)
        });
        finishes.min().map(|(_, incarnation, nanos)| (incarnation, nanos))
    }
}

#[cfg(test)]
mod tests;
