//! The transport within one process: sources of layer parts, handed over by reference.
//!
//! The router opens a transfer and closes it by dropping its [`Transfer`]; what is sent to a transfer that is
//! not open is wanted by nobody and dropped. A source that fails does not end a transfer: another
//! sender may take it up, until the router says that none will. Then the receiver is told at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use hypic_cache::{Source, Waker};
use hypic_state::{PartSource, PartState, Storage};
use parking_lot::Mutex;

/// Names one movement of one entry to one combiner. Never used twice within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(u64);

impl TransferId {
    fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        TransferId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The part of a transport that needs to know nothing of parts.
pub trait Transfers: Send + Sync {
    /// Open a transfer.
    fn open(&self) -> TransferId;

    /// No sender will take up this transfer any more: its receiver is told.
    fn fail(&self, transfer: TransferId, reason: &str);

    /// Forget it.
    fn close(&self, transfer: TransferId);
}

/// An open transfer; dropping it closes it for senders, what its receiver has stays there.
pub struct Transfer {
    id: TransferId,
    transfers: Arc<dyn Transfers>,
}

impl Transfer {
    /// Open one.
    pub fn open(transfers: &Arc<dyn Transfers>) -> Self {
        Transfer { id: transfers.open(), transfers: transfers.clone() }
    }

    /// Its name.
    pub fn id(&self) -> TransferId {
        self.id
    }

    /// Tell its receiver that nothing (more) will come.
    pub fn fail(&self, reason: &str) {
        self.transfers.fail(self.id, reason);
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.transfers.close(self.id);
    }
}

/// The transfers of one process. Clones share them.
pub struct Exchange<S: Storage> {
    lines: Arc<DashMap<TransferId, Arc<Line<S>>>>,
}

impl<S: Storage> Clone for Exchange<S> {
    fn clone(&self) -> Self {
        Exchange { lines: self.lines.clone() }
    }
}

impl<S: Storage> Default for Exchange<S> {
    fn default() -> Self {
        Exchange { lines: Arc::default() }
    }
}

impl<S: Storage> Exchange<S> {
    /// Give the receiver of `transfer` this source of parts.
    pub fn send(&self, transfer: TransferId, source: Source<S>) {
        if let Some(line) = self.line(transfer) {
            line.set(End::Connected(source));
        }
    }

    /// Take the receiving end of `transfer`; `waker` is called whenever it has news. `None` if it is not open.
    pub fn receive(&self, transfer: TransferId, waker: Waker) -> Option<Incoming<S>> {
        let line = self.line(transfer)?;
        line.listen(waker);
        Some(Incoming { line })
    }

    /// Number of open transfers.
    pub fn open_transfers(&self) -> usize {
        self.lines.len()
    }

    fn line(&self, transfer: TransferId) -> Option<Arc<Line<S>>> {
        self.lines.get(&transfer).map(|line| line.clone())
    }
}

impl<S: Storage> Transfers for Exchange<S> {
    fn open(&self) -> TransferId {
        let id = TransferId::fresh();
        self.lines.insert(id, Arc::new(Line { state: Mutex::new(State { end: End::Open, waker: None }) }));
        id
    }

    fn fail(&self, transfer: TransferId, reason: &str) {
        if let Some(line) = self.line(transfer) {
            line.set(End::Failed(reason.into()));
        }
    }

    fn close(&self, transfer: TransferId) {
        self.lines.remove(&transfer);
    }
}

struct Line<S: Storage> {
    state: Mutex<State<S>>,
}

struct State<S: Storage> {
    end: End<S>,
    waker: Option<Waker>,
}

/// What is at the sending end.
enum End<S: Storage> {
    /// Nobody yet.
    Open,
    Connected(Source<S>),
    Failed(Arc<str>),
}

impl<S: Storage> Line<S> {
    fn set(&self, end: End<S>) {
        let waker = {
            let mut state = self.state.lock();
            // Under the lock, so that a receiver that comes now subscribes itself, or finds itself subscribed.
            if let (End::Connected(source), Some(waker)) = (&end, &state.waker) {
                source.subscribe(waker.clone());
            }
            state.end = end;
            state.waker.clone()
        };
        waker.iter().for_each(|wake| wake());
    }

    fn listen(&self, waker: Waker) {
        let mut state = self.state.lock();
        if let End::Connected(source) = &state.end {
            source.subscribe(waker.clone());
        }
        state.waker = Some(waker);
    }
}

/// The receiving end of a transfer.
pub struct Incoming<S: Storage> {
    line: Arc<Line<S>>,
}

impl<S: Storage> PartSource<S> for Incoming<S> {
    fn part(&self, layer: usize) -> PartState<S> {
        match &self.line.state.lock().end {
            End::Open => PartState::Pending,
            End::Failed(reason) => PartState::Failed(reason.clone()),
            End::Connected(source) => match source.part(layer) {
                // Another sender may take the transfer up: only the router gives it up.
                PartState::Failed(_) => PartState::Pending,
                known => known,
            },
        }
    }
}

#[cfg(test)]
mod tests;
