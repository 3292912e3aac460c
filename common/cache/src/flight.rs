//! Entries in the making, and the two places that a layer part can come from.
//!
//! A [`Flight`] owns the layer parts that one computation has finished so far; any number of
//! requests follow it. It ends exactly once: with the whole entry, or with a reason. What can go
//! wrong is a follower that sleeps through a change: so every change is made before any waker is
//! called, and a follower subscribes first and looks then.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hypic_state::{Entry, EntryError, EntryLayout, LayerPart, PartSource, PartState, Storage};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::Pinned;

/// Called when a flight has news. It runs on the thread that made them, so it must be short and must
/// not call back into the store.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// An entry in the making.
pub struct Flight<S: Storage> {
    tokens: Arc<[u32]>,
    seam: usize,
    followers: AtomicU64,
    state: Mutex<State<S>>,
}

struct State<S: Storage> {
    progress: Progress<S>,
    wakers: Vec<Waker>,
}

enum Progress<S: Storage> {
    Running(BTreeMap<usize, Arc<LayerPart<S>>>),
    // Keeps the entry pinned for as long as someone follows the flight.
    Done(Pinned<S>),
    Failed(BTreeMap<usize, Arc<LayerPart<S>>>, Arc<str>),
}

impl<S: Storage> Flight<S> {
    pub(crate) fn new(tokens: Arc<[u32]>, seam: usize) -> Self {
        let state = State { progress: Progress::Running(BTreeMap::new()), wakers: Vec::new() };
        Flight { tokens, seam, followers: AtomicU64::new(0), state: Mutex::new(state) }
    }

    /// All token ids of the segment, seam included.
    pub fn tokens(&self) -> &Arc<[u32]> {
        &self.tokens
    }

    /// Width of the seam in tokens.
    pub fn seam(&self) -> usize {
        self.seam
    }

    /// The part of layer `layer`. Parts that were ready before a failure stay ready.
    pub fn part(&self, layer: usize) -> PartState<S> {
        match &self.state.lock().progress {
            Progress::Running(parts) => parts.get(&layer).cloned().map_or(PartState::Pending, PartState::Ready),
            Progress::Failed(parts, reason) => {
                parts.get(&layer).cloned().map_or_else(|| PartState::Failed(reason.clone()), PartState::Ready)
            }
            Progress::Done(entry) => part_of(entry, layer),
        }
    }

    /// The whole entry, once it is complete.
    pub fn entry(&self) -> Option<Pinned<S>> {
        match &self.state.lock().progress {
            Progress::Done(entry) => Some(entry.clone()),
            _ => None,
        }
    }

    /// Why the flight failed, if it did.
    pub fn failure(&self) -> Option<Arc<str>> {
        match &self.state.lock().progress {
            Progress::Failed(_, reason) => Some(reason.clone()),
            _ => None,
        }
    }

    /// From now on `waker` is called after every new part, at completion and at failure. It is not
    /// called for what has happened before: look at the parts after subscribing.
    pub fn subscribe(&self, waker: Waker) {
        let mut state = self.state.lock();
        if let Progress::Running(_) = state.progress {
            state.wakers.push(waker);
        }
    }

    /// Resolves when the flight has ended.
    ///
    /// # Errors
    /// If there is no entry: why.
    pub async fn landed(&self) -> Result<(), Arc<str>> {
        let news = Arc::new(Notify::new());
        let waker = news.clone();
        self.subscribe(Arc::new(move || waker.notify_one()));
        loop {
            match &self.state.lock().progress {
                Progress::Running(_) => {}
                Progress::Done(_) => return Ok(()),
                Progress::Failed(_, reason) => return Err(reason.clone()),
            }
            news.notified().await;
        }
    }

    /// Counts one more request that follows.
    pub(crate) fn follow(&self) {
        self.followers.fetch_add(1, Ordering::Relaxed);
    }

    /// Requests that want the entry, the leader's included.
    pub(crate) fn uses(&self) -> u64 {
        1 + self.followers.load(Ordering::Relaxed)
    }

    /// Adds a part; false if the layer has one already (the first stays) or the flight has ended.
    pub(crate) fn publish(&self, layer: usize, part: Arc<LayerPart<S>>) -> bool {
        let wakers = {
            let mut state = self.state.lock();
            let Progress::Running(parts) = &mut state.progress else {
                return false;
            };
            if parts.contains_key(&layer) {
                return false;
            }
            parts.insert(layer, part);
            state.wakers.clone()
        };
        wakers.iter().for_each(|wake| wake());
        true
    }

    /// The entry that the published parts make.
    pub(crate) fn assemble(&self, layout: &EntryLayout) -> Result<Entry<S>, EntryError> {
        let parts = match &self.state.lock().progress {
            Progress::Running(parts) => parts.clone(),
            Progress::Failed(..) | Progress::Done(_) => BTreeMap::new(),
        };
        let expected = layout.len();
        let inside = parts.range(..expected).count();
        let got = if inside < expected { inside } else { parts.len() };
        if got != expected {
            return Err(EntryError::Layers { expected, got });
        }
        Entry::new(self.tokens.clone(), self.seam, layout, parts.into_values().collect())
    }

    pub(crate) fn complete(&self, entry: Pinned<S>) {
        self.end(|_| Progress::Done(entry));
    }

    pub(crate) fn fail(&self, reason: Arc<str>) {
        self.end(|parts| Progress::Failed(parts, reason));
    }

    fn end(&self, outcome: impl FnOnce(BTreeMap<usize, Arc<LayerPart<S>>>) -> Progress<S>) {
        let wakers = {
            let mut state = self.state.lock();
            let Progress::Running(parts) = &mut state.progress else {
                debug_assert!(false, "a flight ends once");
                return;
            };
            let parts = std::mem::take(parts);
            state.progress = outcome(parts);
            std::mem::take(&mut state.wakers)
        };
        wakers.iter().for_each(|wake| wake());
    }
}

/// Where a request takes the parts of one segment from.
pub enum Source<S: Storage> {
    /// A whole entry.
    Entry(Pinned<S>),
    /// One in the making.
    Flight(Arc<Flight<S>>),
}

impl<S: Storage> PartSource<S> for Source<S> {
    fn part(&self, layer: usize) -> PartState<S> {
        match self {
            Source::Entry(entry) => part_of(entry, layer),
            Source::Flight(flight) => flight.part(layer),
        }
    }
}

impl<S: Storage> Source<S> {
    /// All token ids of the segment, seam included.
    pub fn tokens(&self) -> &Arc<[u32]> {
        match self {
            Source::Entry(entry) => entry.tokens(),
            Source::Flight(flight) => flight.tokens(),
        }
    }

    /// Width of the seam in tokens.
    pub fn seam(&self) -> usize {
        match self {
            Source::Entry(entry) => entry.seam(),
            Source::Flight(flight) => flight.seam(),
        }
    }

    /// As [`Flight::subscribe`]; a whole entry has no news.
    pub fn subscribe(&self, waker: Waker) {
        if let Source::Flight(flight) = self {
            flight.subscribe(waker);
        }
    }
}

fn part_of<S: Storage>(entry: &Entry<S>, layer: usize) -> PartState<S> {
    match entry.parts().get(layer) {
        Some(part) => PartState::Ready(part.clone()),
        None => PartState::Failed(format!("the entry has {} layers, no layer {layer}", entry.parts().len()).into()),
    }
}

impl<S: Storage> Clone for Source<S> {
    fn clone(&self) -> Self {
        match self {
            Source::Entry(entry) => Source::Entry(entry.clone()),
            Source::Flight(flight) => Source::Flight(flight.clone()),
        }
    }
}

impl<S: Storage> fmt::Debug for Source<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Entry(entry) => f.debug_tuple("Entry").field(entry).finish(),
            Source::Flight(flight) => f.debug_tuple("Flight").field(flight).finish(),
        }
    }
}

impl<S: Storage> fmt::Debug for Flight<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let progress = match &self.state.lock().progress {
            Progress::Running(parts) => format!("{} layers ready", parts.len()),
            Progress::Done(_) => "complete".to_owned(),
            Progress::Failed(_, reason) => format!("failed: {reason}"),
        };
        write!(f, "Flight({} tokens, seam {}, {progress})", self.tokens.len(), self.seam)
    }
}
