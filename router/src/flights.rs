//! Which worker is computing which entry: one computation for concurrent misses of all requests of a router.
//!
//! A miss boards the flight that its key has, at the worker where it is computed, or begins one. A flight is known for
//! as long as a guard of it lives; a request that goes away takes its guard with it, so nothing stays behind. What
//! is computed for other routers is not known here: workers tell of it in their directories, a moment later. Two routers
//! that miss one key within that moment cost a computation, never an answer.

use std::collections::HashMap;
use std::sync::Arc;

use hypic_cache::EntryKey;
use parking_lot::{Mutex, MutexGuard};

#[derive(Default)]
struct Table {
    flights: HashMap<EntryKey, Flight>,
    next: u64,
}

struct Flight {
    worker: Arc<str>,
    /// Tells a flight from a later one of the same key.
    number: u64,
    guards: usize,
}

/// The flights of a router. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Flights(Arc<Mutex<Table>>);

impl Flights {
    /// Nobody else looks or boards until what is returned goes: of two misses of one key one must see the other.
    pub fn lock(&self) -> Desk<'_> {
        Desk { flights: self, table: self.0.lock() }
    }

    /// Keys that are being computed.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.lock().flights.len()
    }
}

/// The flights, for one who boards.
pub(crate) struct Desk<'a> {
    flights: &'a Flights,
    table: MutexGuard<'a, Table>,
}

impl Desk<'_> {
    /// Where `key` is being computed.
    pub fn worker(&self, key: EntryKey) -> Option<Arc<str>> {
        self.table.flights.get(&key).map(|flight| flight.worker.clone())
    }

    /// Have `key` computed at `worker`, or join there. A flight at another worker is replaced: it has failed.
    pub fn board(&mut self, key: EntryKey, worker: &str) -> Boarded {
        let table = &mut *self.table;
        let number = match table.flights.get_mut(&key) {
            Some(flight) if &*flight.worker == worker => {
                flight.guards += 1;
                flight.number
            }
            _ => {
                table.next += 1;
                table.flights.insert(key, Flight { worker: worker.into(), number: table.next, guards: 1 });
                table.next
            }
        };
        Boarded { flights: self.flights.clone(), key, number }
    }
}

/// A share of a flight.
pub(crate) struct Boarded {
    flights: Flights,
    key: EntryKey,
    number: u64,
}

impl Drop for Boarded {
    fn drop(&mut self) {
        let mut table = self.flights.0.lock();
        let Some(flight) = table.flights.get_mut(&self.key).filter(|flight| flight.number == self.number) else {
            return;
        };
        flight.guards -= 1;
        if flight.guards == 0 {
            table.flights.remove(&self.key);
        }
    }
}
