//! Placing entries on workers: from one that holds it if that is quicker than computing it at another one, else joining
//! the computation that is under way, for this router or another one, else where it is computed first. Owns the charges
//! and flights of what it places; with no usable worker nothing is placed.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use hypic_cache::EntryKey;
use hypic_transport::{PrefillJob, Scatter};

use super::{Origin, Wanted};
use crate::balance::{Charge, WorkerId};
use crate::directory::{Directory, Holders};
use crate::flights::{Boarded, Desk};
use crate::router::Core;

/// Who brings an entry.
pub(crate) struct Placement {
    pub worker: Arc<dyn Scatter>,
    /// It should hold it.
    pub held_only: bool,
    /// The worker's load by it; none for one who joins.
    pub charge: Option<Charge>,
    /// Tells later misses where it is computed.
    pub boarded: Option<Boarded>,
}

/// Places work on the members of one moment.
pub(crate) struct Placer<'a> {
    core: &'a Core,
    directory: Arc<Directory>,
    /// Whether the worker at this place gets no work now.
    unusable: Vec<bool>,
    /// Those that get none.
    excluded: Vec<WorkerId>,
}

/// Rows of a job's isolated prefill.
pub(crate) fn rows(job: &PrefillJob) -> usize {
    job.tokens.len() + job.anchor.len()
}

impl<'a> Placer<'a> {
    pub fn new(core: &'a Core, directory: Arc<Directory>) -> Self {
        let idle = |w: &Arc<dyn Scatter>| !w.is_running() || !core.breakers.allows(w.id());
        let unusable: Vec<bool> = directory.view.scatter.iter().map(idle).collect();
        let workers = directory.view.scatter.iter().zip(&unusable).filter(|(_, unusable)| **unusable);
        let excluded = workers.map(|(worker, _)| WorkerId::from(worker.id())).collect();
        Placer { core, directory, unusable, excluded }
    }

    /// The members.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Number of usable workers.
    pub fn workers(&self) -> usize {
        self.unusable.iter().filter(|&&unusable| !unusable).count()
    }

    /// Whether a usable worker is among the holders of an entry.
    pub fn is_held(&self, holders: &Holders) -> bool {
        holders.workers.iter().any(|&i| !self.unusable[i])
    }

    /// Have a job's entry sent by the one of its holders that has sent it first; `None` if there is none, or if it is
    /// quicker to compute it elsewhere.
    pub fn place_held(&self, job: &PrefillJob, holders: &Holders) -> Option<Placement> {
        let (sending, worker) = self.holder(job, holders)?;
        let balancer = self.core.fleet.balancer();
        let backlog = balancer.backlog(worker.id())?;
        let computing = balancer.soonest(rows(job), &self.excluded);
        if computing.is_some_and(|computing| computing < backlog.saturating_add(sending)) {
            return None;
        }
        let charge = balancer.charge_time(worker.id(), sending);
        Some(Placement { worker: worker.clone(), held_only: true, charge, boarded: None })
    }

    /// The holder that would have sent a job's entry first, and how long sending alone takes it.
    pub fn holder(&self, job: &PrefillJob, holders: &Holders) -> Option<(Duration, &Arc<dyn Scatter>)> {
        let balancer = self.core.fleet.balancer();
        let usable = holders.workers.iter().filter(|&&i| !self.unusable[i]).map(|&i| &self.directory.view.scatter[i]);
        let sent = usable.filter_map(|worker| {
            let sending = balancer.sending(worker.id(), job.tokens.len(), holders.bytes)?;
            Some((balancer.backlog(worker.id())?.saturating_add(sending), sending, worker))
        });
        sent.min_by_key(|(whole, ..)| *whole).map(|(_, sending, worker)| (sending, worker))
    }

    /// Have entries computed, but not by the workers `except`: in each case where that is under way already, else, the
    /// longest first, where it is done first. `None` for each that no worker can take. The same entry twice is computed
    /// once.
    pub fn place_cold(&self, jobs: &[&PrefillJob], except: &[Arc<str>]) -> Vec<Option<Placement>> {
        let except = except.iter().map(|id| WorkerId::from(id.clone()));
        let excluded: Vec<WorkerId> = self.excluded.iter().cloned().chain(except).collect();
        let usable =
            |id: &str| self.directory.view.worker(id).filter(|_| !excluded.iter().any(|known| known.as_str() == id));

        let mut desk = self.core.flights.lock();
        let mut placed: Vec<Option<Placement>> = jobs.iter().map(|_| None).collect();
        let (mut cold, mut seen) = (Vec::new(), HashSet::new());
        for (i, job) in jobs.iter().enumerate() {
            match self.under_way(&desk, job.key, usable) {
                Some(worker) => placed[i] = Some(joined(&mut desk, job.key, worker)),
                None if seen.insert(job.key) => cold.push(i),
                None => {}
            }
        }
        let lengths: Vec<usize> = cold.iter().map(|&i| rows(jobs[i])).collect();
        for assignment in self.core.fleet.balancer().assign_excluding(&lengths, &excluded).unwrap_or_default() {
            let i = cold[assignment.segment];
            // Not there if it has become a member just now.
            if let Some(worker) = usable(assignment.worker.as_str()) {
                let boarded = Some(desk.board(jobs[i].key, worker.id()));
                let charge = Some(assignment.charge);
                placed[i] = Some(Placement { worker: worker.clone(), held_only: false, charge, boarded });
            }
        }
        // The same entry once more in one prompt.
        for (job, placed) in jobs.iter().zip(&mut placed) {
            if placed.is_none()
                && let Some(worker) = desk.worker(job.key).and_then(|id| usable(&id))
            {
                *placed = Some(joined(&mut desk, job.key, worker));
            }
        }
        placed
    }

    /// The worker that has an entry in the making: for this router, else for another one.
    fn under_way<'b>(
        &'b self,
        desk: &Desk<'_>,
        key: EntryKey,
        usable: impl Fn(&str) -> Option<&'b Arc<dyn Scatter>>,
    ) -> Option<&'b Arc<dyn Scatter>> {
        let own = desk.worker(key).and_then(|id| usable(&id));
        own.or_else(|| self.directory.makers(key).into_iter().find_map(|i| usable(self.directory.view.scatter[i].id())))
    }

    /// Have an entry computed a second time, by a worker that has nothing to do; `None` if none is idle.
    pub fn place_idle(&self, job: &PrefillJob, except: &[Arc<str>]) -> Option<Placement> {
        let balancer = self.core.fleet.balancer();
        let loads = balancer.loads();
        let idle = |id: &str| {
            loads.iter().any(|load| load.worker.as_str() == id && load.segments == 0 && load.others.is_zero())
        };
        let mut usable = self.directory.view.scatter.iter().zip(&self.unusable).filter(|(_, unusable)| !**unusable);
        let (worker, _) = usable.find(|(w, _)| idle(w.id()) && !except.iter().any(|id| **id == *w.id()))?;
        let charge = balancer.charge(worker.id(), rows(job));
        Some(Placement { worker: worker.clone(), held_only: false, charge, boarded: None })
    }
}

fn joined(desk: &mut Desk<'_>, key: EntryKey, worker: &Arc<dyn Scatter>) -> Placement {
    let boarded = Some(desk.board(key, worker.id()));
    Placement { worker: worker.clone(), held_only: false, charge: None, boarded }
}

/// Say who has or makes what the combiner does not hold; `holders` are those of each wanted entry.
pub(super) fn place(placer: &Placer<'_>, wanted: &mut [Wanted], holders: &[Option<Holders>]) {
    let mut cold = Vec::new();
    for (i, wanted) in wanted.iter_mut().enumerate() {
        if matches!(wanted.from, Origin::Combiner) {
            continue;
        }
        let holders = holders[wanted.segment].as_ref();
        match holders.and_then(|holders| placer.place_held(&wanted.job, holders)) {
            Some(placement) => wanted.from = Origin::Worker(placement),
            None => cold.push(i),
        }
    }
    let jobs: Vec<&PrefillJob> = cold.iter().map(|&i| &wanted[i].job).collect();
    let placements = placer.place_cold(&jobs, &[]);
    for (i, placement) in cold.into_iter().zip(placements) {
        if let Some(placement) = placement {
            wanted[i].from = Origin::Worker(placement);
        }
    }
}

/// Times of the segments that workers are to compute.
pub(super) fn computed(wanted: &[Wanted], time: impl Fn(usize) -> Duration) -> Vec<Duration> {
    let is_computed = |wanted: &&Wanted| match &wanted.from {
        // One who joins a computation has no charge.
        Origin::Worker(placement) => !placement.held_only && placement.charge.is_some(),
        Origin::Combiner | Origin::LastResort => false,
    };
    wanted.iter().filter(is_computed).map(|wanted| time(rows(&wanted.job))).collect()
}

/// How many take longer alone than all others spread over `workers`: they bound the makespan. A lone one has nothing that
/// another split would have made quicker.
pub(super) fn bound_alone(times: &[Duration], workers: usize) -> usize {
    if times.len() < 2 {
        return 0;
    }
    let all: Duration = times.iter().sum();
    let workers = u32::try_from(workers.max(1)).unwrap_or(u32::MAX);
    times.iter().filter(|&&time| time > (all - time) / workers).count()
}
