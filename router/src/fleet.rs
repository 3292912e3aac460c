//! The members that a router sends work to, as they are at this moment.
//!
//! Owns the current view and, with it, who is known to the balancer: setting a view makes its workers known, idle, and
//! forgets those that are not in it. Counts the plans that this router has at each combiner, because what a remote one
//! tells of its load is a little old. What can go wrong: two members of one id, of which the first is used.
//! Owns the index of what members hold, too: whoever follows a member's directory does so for a copy in that index.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;

use hypic_transport::grpc::Index;
use hypic_transport::{Combine, Scatter};
use parking_lot::{Mutex, RwLock};

use crate::balance::{Balancer, SpeedConfig};
use crate::directory::Directory;

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

/// Ids of combiners, if they are known.
type Listed = Vec<Option<String>>;

/// The members, changing.
pub struct Fleet {
    index: Arc<Index>,
    present: RwLock<Arc<Directory>>,
    /// Held while the view changes, so that the balancer's workers are those of the view.
    changing: Mutex<()>,
    balancer: Balancer,
    /// Plans of this router at each combiner.
    plans: Mutex<HashMap<Arc<str>, usize>>,
    /// Combiners that the membership lists, if that is known.
    listed: Mutex<Option<Listed>>,
}

impl Fleet {
    /// These members.
    pub fn new(view: View) -> Self {
        let index = Arc::<Index>::default();
        let fleet = Fleet {
            present: RwLock::new(Arc::new(Directory::new(index.clone(), View::default()))),
            index,
            changing: Mutex::default(),
            balancer: Balancer::new(SpeedConfig::default()),
            plans: Mutex::default(),
            listed: Mutex::default(),
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
        // Also of who was there before: it may be another connection.
        for worker in &view.scatter {
            let told = Arc::downgrade(worker);
            self.balancer.ask_backlog(worker.id(), move || told.upgrade()?.backlog());
        }
        *self.present.write() = Arc::new(Directory::new(self.index.clone(), view));
        for id in before.difference(&ids) {
            self.balancer.remove_worker(id);
        }
    }

    /// The members now.
    pub fn view(&self) -> Arc<View> {
        self.present.read().view.clone()
    }

    /// What members of other processes hold. A member whose copy is part of it before it is [set](Self::set) is looked
    /// up there; any other is asked by itself.
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// The members now, and what they hold.
    pub(crate) fn directory(&self) -> Arc<Directory> {
        self.present.read().clone()
    }

    /// These combiners stand in the membership, whether they answer or not, by their ids as far as those are known;
    /// `None`: it is not known which do. A request that has lost its combiner waits for another one only if there may be
    /// one.
    pub fn set_listed_combiners(&self, listed: Option<Vec<Option<String>>>) {
        *self.listed.lock() = listed;
    }

    /// Whether there may be a combiner that is not one of the `lost` ones.
    pub(crate) fn may_have_another(&self, lost: &[String]) -> bool {
        let listed = self.listed.lock();
        let Some(listed) = &*listed else { return true };
        let nameless = listed.iter().filter(|id| id.is_none()).count();
        let others = listed.iter().flatten().any(|id| !lost.contains(id));
        // A lost one that is not listed by its id was a nameless one, or is listed no more.
        let unlisted = lost.iter().filter(|lost| !listed.iter().flatten().any(|id| id == *lost)).count();
        others || nameless > unlisted
    }

    /// The workers' loads and speeds.
    pub fn balancer(&self) -> &Balancer {
        &self.balancer
    }

    /// Plans that this router has at a combiner.
    pub(crate) fn plans(&self, combiner: &str) -> usize {
        self.plans.lock().get(combiner).copied().unwrap_or_default()
    }

    /// Plans that this router has anywhere.
    pub(crate) fn all_plans(&self) -> usize {
        self.plans.lock().values().sum()
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
