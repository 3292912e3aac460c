//! The members that a router sends work to, as they are at this moment.
//!
//! Owns the current view and, with it, who is known to the balancer: setting a view makes its workers known, idle, and
//! forgets those that are not in it. Counts the plans that this router has at each combiner, because what a remote one
//! tells of its load is a little old. What can go wrong: two members of one id, of which the first is used.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;

use hypic_transport::{Combine, Scatter};
use parking_lot::{Mutex, RwLock};

use crate::balance::{Balancer, SpeedConfig};

/// The members at one moment.
#[derive(Clone, Default)]
pub struct View {
    /// Scatter workers. With none, combiners compute everything.
    pub scatter: Vec<Arc<dyn Scatter>>,
    /// Combiners.
    pub combiners: Vec<Arc<dyn Combine>>,
}

impl View {
    /// The worker of this id.
    pub(crate) fn worker(&self, id: &str) -> Option<&Arc<dyn Scatter>> {
        self.scatter.iter().find(|worker| worker.id() == id)
    }
}

/// The members, changing.
pub struct Fleet {
    view: RwLock<Arc<View>>,
    /// Held while the view changes, so that the balancer's workers are those of the view.
    changing: Mutex<()>,
    balancer: Balancer,
    /// Plans of this router at each combiner.
    plans: Mutex<HashMap<Arc<str>, usize>>,
}

impl Fleet {
    /// These members.
    pub fn new(view: View) -> Self {
        let fleet = Fleet {
            view: RwLock::default(),
            changing: Mutex::default(),
            balancer: Balancer::new(SpeedConfig::default()),
            plans: Mutex::default(),
        };
        fleet.set(view);
        fleet
    }

    /// From now on, these members. One whose id was there before is the same as before, and keeps its load and speed.
    pub fn set(&self, mut view: View) {
        let _changing = self.changing.lock();
        let mut ids = HashSet::new();
        view.scatter.retain(|worker| unique(&mut ids, worker.id()));
        let mut combiners = HashSet::new();
        view.combiners.retain(|combiner| unique(&mut combiners, combiner.id()));
        let before: HashSet<String> = self.view().scatter.iter().map(|worker| worker.id().to_owned()).collect();
        // In the order of the view, which decides between equals.
        for id in view.scatter.iter().map(|worker| worker.id()).filter(|id| !before.contains(*id)) {
            if let Err(error) = self.balancer.add_worker(id) {
                tracing::warn!(worker = id, %error, "worker is not used");
            }
        }
        *self.view.write() = Arc::new(view);
        for id in before.difference(&ids) {
            self.balancer.remove_worker(id);
        }
    }

    /// The members now.
    pub fn view(&self) -> Arc<View> {
        self.view.read().clone()
    }

    /// The workers' loads and speeds.
    pub fn balancer(&self) -> &Balancer {
        &self.balancer
    }

    /// Plans that this router has at a combiner.
    pub(crate) fn plans(&self, combiner: &str) -> usize {
        self.plans.lock().get(combiner).copied().unwrap_or_default()
    }

    /// Count a plan at `combiner` until the guard goes.
    pub(crate) fn occupy(self: &Arc<Self>, combiner: &str) -> Occupied {
        let combiner: Arc<str> = combiner.into();
        *self.plans.lock().entry(combiner.clone()).or_default() += 1;
        Occupied { fleet: self.clone(), combiner }
    }
}

fn unique(ids: &mut HashSet<String>, id: &str) -> bool {
    let new = ids.insert(id.to_owned());
    if !new {
        tracing::warn!(member = id, "two members have one id: the second is not used");
    }
    new
}

/// A plan at a combiner.
pub(crate) struct Occupied {
    fleet: Arc<Fleet>,
    combiner: Arc<str>,
}

impl Drop for Occupied {
    fn drop(&mut self) {
        let mut plans = self.fleet.plans.lock();
        if let Some(count) = plans.get_mut(&self.combiner) {
            *count -= 1;
            if *count == 0 {
                plans.remove(&self.combiner);
            }
        }
    }
}
