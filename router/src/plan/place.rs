//! Placing entries on workers: from one that holds it if that is quicker than computing it at another one, else joining
//! the computation that is under way, else where it is computed first. Owns the charges and flights of what it places;
//! with no usable worker nothing is placed.

use std::collections::HashSet;
use std::sync::Arc;

use hypic_cache::EntryKey;
use hypic_transport::{PrefillJob, Scatter};

use crate::balance::{Charge, WorkerId};
use crate::fleet::View;
use crate::flights::Boarded;
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
    view: Arc<View>,
    /// Members that get no work now.
    unusable: Vec<WorkerId>,
}

/// Rows of a job's isolated prefill.
pub(crate) fn rows(job: &PrefillJob) -> usize {
    job.tokens.len() + job.anchor.len()
}

impl<'a> Placer<'a> {
    pub fn new(core: &'a Core, view: Arc<View>) -> Self {
        let idle = |w: &&Arc<dyn Scatter>| !w.is_running() || !core.breakers.allows(w.id());
        let unusable = view.scatter.iter().filter(idle).map(|w| WorkerId::from(w.id())).collect();
        Placer { core, view, unusable }
    }

    /// Number of usable workers.
    pub fn workers(&self) -> usize {
        self.view.scatter.len() - self.unusable.len()
    }

    /// Whether a usable worker holds an entry.
    pub fn is_held(&self, key: EntryKey) -> bool {
        self.usable().any(|worker| worker.holds(key))
    }

    /// Have a job's entry sent by the least loaded worker that holds it; `None` if there is none, or if it is quicker to
    /// compute it elsewhere.
    pub fn place_held(&self, job: &PrefillJob) -> Option<Placement> {
        let balancer = self.core.fleet.balancer();
        let holders = self.usable().filter(|worker| worker.holds(job.key));
        let loads = holders.filter_map(|worker| Some((balancer.backlog(worker.id())?, worker)));
        let (backlog, worker) = loads.min_by_key(|(backlog, _)| *backlog)?;
        let sending = self.core.config.costs.sending(job.tokens.len());
        // It has to be sent in either case.
        if balancer.soonest(rows(job), &self.unusable).is_some_and(|computing| computing < backlog) {
            return None;
        }
        let charge = balancer.charge_time(worker.id(), sending);
        Some(Placement { worker: worker.clone(), held_only: true, charge, boarded: None })
    }

    /// Have entries computed, but not by the workers `except`: in each case where that is under way already, else, the
    /// longest first, where it is done first. `None` for each that no worker can take. The same entry twice is computed
    /// once.
    pub fn place_cold(&self, jobs: &[&PrefillJob], except: &[Arc<str>]) -> Vec<Option<Placement>> {
        let excluded: Vec<WorkerId> =
            self.unusable.iter().cloned().chain(except.iter().map(|id| WorkerId::from(id.clone()))).collect();
        let usable = |id: &str| self.view.worker(id).filter(|_| !excluded.iter().any(|known| known.as_str() == id));

        let mut desk = self.core.flights.lock();
        let mut placed: Vec<Option<Placement>> = jobs.iter().map(|_| None).collect();
        let (mut cold, mut seen) = (Vec::new(), HashSet::new());
        for (i, job) in jobs.iter().enumerate() {
            let under_way = desk.worker(job.key).is_some_and(|id| usable(&id).is_some());
            if !under_way && seen.insert(job.key) {
                cold.push(i);
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
        for (job, placed) in jobs.iter().zip(&mut placed) {
            if placed.is_some() {
                continue;
            }
            if let Some(worker) = desk.worker(job.key).and_then(|id| usable(&id)) {
                let boarded = Some(desk.board(job.key, worker.id()));
                *placed = Some(Placement { worker: worker.clone(), held_only: false, charge: None, boarded });
            }
        }
        placed
    }

    /// Have an entry computed a second time, by a worker that has nothing to do; `None` if none is idle.
    pub fn place_idle(&self, job: &PrefillJob, except: &[Arc<str>]) -> Option<Placement> {
        let balancer = self.core.fleet.balancer();
        let loads = balancer.loads();
        let idle = |id: &str| loads.iter().any(|load| load.worker.as_str() == id && load.segments == 0);
        let worker = self.usable().find(|w| idle(w.id()) && !except.iter().any(|id| **id == *w.id()))?;
        let charge = balancer.charge(worker.id(), rows(job));
        Some(Placement { worker: worker.clone(), held_only: false, charge, boarded: None })
    }

    fn usable(&self) -> impl Iterator<Item = &Arc<dyn Scatter>> {
        self.view.scatter.iter().filter(|worker| !self.unusable.iter().any(|id| id.as_str() == worker.id()))
    }
}
