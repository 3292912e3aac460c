//! Counts of what is open: a number that goes up with each guard and down when the guard goes, in whatever way. Cannot
//! fail; a guard that is never dropped shows as a gauge that does not return to zero, which is what it is for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many things of a kind are open. Clones share the number.
#[derive(Clone, Debug, Default)]
pub struct Open(Arc<AtomicU64>);

impl Open {
    /// One more, until the guard is dropped.
    pub fn enter(&self) -> OpenGuard {
        self.0.fetch_add(1, Ordering::AcqRel);
        OpenGuard(self.0.clone())
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// One open thing.
#[must_use = "it counts only while this lives"]
#[derive(Debug)]
pub struct OpenGuard(Arc<AtomicU64>);

impl Drop for OpenGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_guard_counts_once() {
        let open = Open::default();
        let (one, two) = (open.enter(), open.clone().enter());
        assert_eq!(open.count(), 2);
        drop(one);
        assert_eq!(open.count(), 1);
        drop(two);
        assert_eq!(open.count(), 0);
    }
}
