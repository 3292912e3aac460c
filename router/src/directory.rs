//! Where entries are, as far as the router knows: who of the present members holds one, and who has one in the making.
//!
//! Members whose directories are followed stand in one index, so a key costs one look whatever their number. Those of
//! this process stand in none and are asked one by one. What is told may be stale; the member has the last word.

use std::collections::HashMap;
use std::sync::Arc;

use hypic_cache::EntryKey;
use hypic_transport::grpc::Index;

use crate::fleet::View;

/// A place in a [`View`].
#[derive(Clone, Copy)]
enum Place {
    Worker(usize),
    Combiner(usize),
}

/// Who holds an entry, as places in the view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holders {
    /// Its bytes, if they are known.
    pub bytes: Option<u64>,
    pub workers: Vec<usize>,
    pub combiners: Vec<usize>,
}

/// The members of one moment, and where to look for what they hold.
pub(crate) struct Directory {
    index: Arc<Index>,
    pub view: Arc<View>,
    places: HashMap<String, Place>,
    /// Members that are not in the index.
    asked_workers: Vec<usize>,
    asked_combiners: Vec<usize>,
}

impl Directory {
    pub fn new(index: Arc<Index>, view: View) -> Self {
        let workers = view.scatter.iter().enumerate().map(|(i, worker)| (worker.id().to_owned(), Place::Worker(i)));
        let combiners = view.combiners.iter().enumerate().map(|(i, c)| (c.id().to_owned(), Place::Combiner(i)));
        let places: HashMap<String, Place> = workers.chain(combiners).collect();
        let asked_workers = (0..view.scatter.len()).filter(|&i| !index.follows(view.scatter[i].id())).collect();
        let asked_combiners = (0..view.combiners.len()).filter(|&i| !index.follows(view.combiners[i].id())).collect();
        Directory { index, view: Arc::new(view), places, asked_workers, asked_combiners }
    }

    /// Who holds the entry `key`.
    pub fn holders(&self, key: EntryKey) -> Holders {
        let mut holders = Holders::default();
        holders.bytes = self.index.holders(key, |member| match self.places.get(member) {
            Some(&Place::Worker(i)) => holders.workers.push(i),
            Some(&Place::Combiner(i)) => holders.combiners.push(i),
            // It was a member a moment ago, or will be.
            None => {}
        });
        holders.workers.extend(self.asked_workers.iter().filter(|&&i| self.view.scatter[i].holds(key)));
        holders.combiners.extend(self.asked_combiners.iter().filter(|&&i| self.view.combiners[i].holds(key)));
        // In the order of the view, which decides between equals. A member that has come back under its id is told of
        // twice until its old stay is cleared.
        for places in [&mut holders.workers, &mut holders.combiners] {
            places.sort_unstable();
            places.dedup();
        }
        holders
    }

    /// The workers that have the entry `key` in the making, for whichever router.
    pub fn makers(&self, key: EntryKey) -> Vec<usize> {
        let mut makers = Vec::new();
        self.index.makers(key, |member| {
            if let Some(&Place::Worker(i)) = self.places.get(member) {
                makers.push(i);
            }
        });
        makers.sort_unstable();
        makers.dedup();
        makers
    }
}
