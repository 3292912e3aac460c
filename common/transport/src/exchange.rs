//! A combiner's transfers: where sources of layer parts meet the compositions that wait for them.
//!
//! A combiner opens a transfer for each entry of a plan and closes it by dropping its [`Incoming`]. A source that is sent
//! to a transfer that is not open is refused, so a late one can never land in another request. A source that fails
//! does not end a transfer: the router sends another attempt, of a higher generation, which takes its place. An
//! older generation than the one that is connected is refused.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use hypic_cache::{Source, Waker};
use hypic_state::{PartSource, PartState, Storage};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::KvAhead;
use crate::transport::{Delivered, DeliveryError, Parcel, Transport};

/// Closed transfers that are remembered, so that a late sender is told at once.
const REMEMBERED: usize = 1 << 14;

/// Time in which a plan must have come whose entries are there already.
const OPEN_WAIT: Duration = Duration::from_secs(5);

/// Names one attempt to move one entry to one combiner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId {
    /// Drawn at random, never used twice.
    pub id: u64,
    /// Counts the attempts.
    pub generation: u32,
}

impl TransferId {
    /// The first attempt of a new transfer.
    pub fn random() -> Self {
        TransferId { id: rand::random(), generation: 0 }
    }

    /// The next attempt at the same transfer.
    pub fn next(self) -> Self {
        TransferId { generation: self.generation + 1, ..self }
    }
}

/// Why a transfer takes no source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Nobody has opened it (yet).
    #[error("the transfer is not open")]
    NotOpen,
    /// Its request has ended.
    #[error("the transfer is closed: its request has ended")]
    Closed,
    /// A later attempt is connected.
    #[error("a later attempt has taken the transfer's place")]
    Superseded,
}

/// The transfers to one combiner. Clones share them.
pub struct Exchange<S: Storage> {
    shared: Arc<Shared<S>>,
}

struct Shared<S: Storage> {
    lines: DashMap<u64, Arc<Line<S>>>,
    closed: Mutex<Closed>,
    opened: Notify,
}

#[derive(Default)]
struct Closed {
    order: VecDeque<u64>,
    ids: HashSet<u64>,
}

impl<S: Storage> Clone for Exchange<S> {
    fn clone(&self) -> Self {
        Exchange { shared: self.shared.clone() }
    }
}

impl<S: Storage> Default for Exchange<S> {
    fn default() -> Self {
        let shared = Shared { lines: DashMap::new(), closed: Mutex::default(), opened: Notify::new() };
        Exchange { shared: Arc::new(shared) }
    }
}

impl<S: Storage> Exchange<S> {
    /// Open the transfer `id`; it closes with what is returned. An id that is open already is closed for its first owner.
    pub fn open(&self, id: u64) -> Incoming<S> {
        let line = Arc::new(Line { state: Mutex::new(State { generation: 0, source: None, waker: None }) });
        self.shared.lines.insert(id, line.clone());
        self.shared.opened.notify_waiters();
        Incoming { id, line, shared: self.shared.clone() }
    }

    /// Give the receiver of `transfer` this source of parts.
    ///
    /// # Errors
    /// If the transfer is not open, or a later attempt is connected.
    pub fn send(&self, transfer: TransferId, source: Source<S>) -> Result<(), Refused> {
        let line = self.shared.lines.get(&transfer.id).map(|line| line.clone());
        match line {
            Some(line) => line.connect(transfer.generation, source),
            None if self.shared.closed.lock().ids.contains(&transfer.id) => Err(Refused::Closed),
            None => Err(Refused::NotOpen),
        }
    }

    /// Resolves when `transfer` takes sources.
    ///
    /// # Errors
    /// If it is closed, or a later attempt is connected. While nobody has opened it this waits.
    pub async fn opened(&self, transfer: TransferId) -> Result<(), Refused> {
        loop {
            let news = self.shared.opened.notified();
            let mut news = std::pin::pin!(news);
            // Enabled before looking, or an opening in between is missed.
            news.as_mut().enable();
            if let Some(line) = self.shared.lines.get(&transfer.id) {
                return line.accepts(transfer.generation);
            }
            if self.shared.closed.lock().ids.contains(&transfer.id) {
                return Err(Refused::Closed);
            }
            news.await;
        }
    }

    /// Number of open transfers.
    pub fn open_transfers(&self) -> usize {
        self.shared.lines.len()
    }
}

impl<S: Storage> Transport<S> for Exchange<S> {
    fn ahead(&self) -> Option<KvAhead<S>> {
        None
    }

    /// By reference: the combiner is in this process. A plan that is still on its way is waited for.
    fn deliver(&self, parcel: Parcel<S>) -> BoxFuture<'static, Result<Delivered, DeliveryError>> {
        let Parcel { to, source, .. } = parcel;
        let unwanted = |why: Refused| DeliveryError::Unwanted(why.to_string());
        match self.send(to.transfer, source.clone()) {
            Err(Refused::NotOpen) => {}
            sent => return ready(sent.map(|()| Delivered::default()).map_err(unwanted)).boxed(),
        }
        let exchange = self.clone();
        let opened = async move {
            timeout(OPEN_WAIT, exchange.opened(to.transfer)).await.unwrap_or(Err(Refused::NotOpen))?;
            exchange.send(to.transfer, source).map(|()| Delivered::default())
        };
        opened.map(move |sent| sent.map_err(unwanted)).boxed()
    }
}

struct Line<S: Storage> {
    state: Mutex<State<S>>,
}

struct State<S: Storage> {
    /// Of the source.
    generation: u32,
    source: Option<Source<S>>,
    waker: Option<Waker>,
}

impl<S: Storage> Line<S> {
    fn accepts(&self, generation: u32) -> Result<(), Refused> {
        let state = self.state.lock();
        let later = state.source.is_some() && state.generation > generation;
        if later { Err(Refused::Superseded) } else { Ok(()) }
    }

    fn connect(&self, generation: u32, source: Source<S>) -> Result<(), Refused> {
        let waker = {
            let mut state = self.state.lock();
            if state.source.is_some() && state.generation > generation {
                return Err(Refused::Superseded);
            }
            if state.source.as_ref().is_some_and(is_whole) {
                // All of it is there, bit for bit what the later attempt would bring.
                return Ok(());
            }
            // Under the lock, so that a receiver that comes now subscribes itself, or finds itself subscribed.
            if let Some(waker) = &state.waker {
                source.subscribe(waker.clone());
            }
            state.generation = generation;
            state.source = Some(source);
            state.waker.clone()
        };
        waker.iter().for_each(|wake| wake());
        Ok(())
    }
}

fn is_whole<S: Storage>(source: &Source<S>) -> bool {
    match source {
        Source::Entry(_) => true,
        Source::Flight(flight) => flight.entry().is_some(),
    }
}

/// The receiving end of a transfer; dropping it closes the transfer.
pub struct Incoming<S: Storage> {
    id: u64,
    line: Arc<Line<S>>,
    shared: Arc<Shared<S>>,
}

impl<S: Storage> Incoming<S> {
    /// From now on `waker` is called whenever there is news.
    pub fn listen(&self, waker: Waker) {
        let mut state = self.line.state.lock();
        if let Some(source) = &state.source {
            source.subscribe(waker.clone());
        }
        state.waker = Some(waker);
    }
}

impl<S: Storage> Drop for Incoming<S> {
    fn drop(&mut self) {
        // Remembered first: nobody may find it neither open nor closed.
        let mut closed = self.shared.closed.lock();
        if closed.ids.insert(self.id) {
            closed.order.push_back(self.id);
        }
        if closed.order.len() > REMEMBERED
            && let Some(oldest) = closed.order.pop_front()
        {
            closed.ids.remove(&oldest);
        }
        drop(closed);
        self.shared.lines.remove_if(&self.id, |_, line| Arc::ptr_eq(line, &self.line));
    }
}

impl<S: Storage> PartSource<S> for Incoming<S> {
    fn part(&self, layer: usize) -> PartState<S> {
        match &self.line.state.lock().source {
            None => PartState::Pending,
            Some(source) => match source.part(layer) {
                // Another attempt may take its place: the router decides when there is none.
                PartState::Failed(_) => PartState::Pending,
                known => known,
            },
        }
    }
}

#[cfg(test)]
mod tests;
