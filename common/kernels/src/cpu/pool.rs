use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

/// Work below this many floating-point operations is not worth waking another thread for.
const FLOPS_PER_TASK: usize = 1_000_000;

/// The threads of one backend.
#[derive(Clone)]
pub(super) struct Pool {
    pool: Option<Arc<rayon::ThreadPool>>,
    threads: usize,
}

impl Pool {
    /// `threads` counts the caller's; one thread means that everything runs on the caller's.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        let pool = (threads > 1).then(|| {
            let built = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|i| format!("hypic-cpu-{i}"))
                .build();
            Arc::new(built.expect("the system can start threads"))
        });
        Pool { pool, threads }
    }

    /// How many threads `flops` operations are worth.
    pub fn split(&self, flops: usize) -> usize {
        self.threads.min(flops / FLOPS_PER_TASK + 1)
    }

    /// Run `task(i)` for `i` in `0..tasks`, in parallel if `flops` in all are worth it. `task` must not
    /// depend on which thread runs it, or in which order.
    pub fn run(&self, tasks: usize, flops: usize, task: impl Fn(usize) + Sync + Send) {
        match &self.pool {
            Some(pool) if tasks > 1 && self.split(flops) > 1 => {
                pool.install(|| (0..tasks).into_par_iter().with_max_len(1).for_each(task));
            }
            _ => (0..tasks).for_each(task),
        }
    }
}

/// A slice that parallel tasks write to, each its own part.
pub(super) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    _slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is an exclusive borrow of a slice; who takes parts of it promises that they are disjoint.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// `slice`, to be taken apart.
    pub fn new(slice: &'a mut [T]) -> Self {
        Shared {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            _slice: PhantomData,
        }
    }

    /// A part of the slice.
    ///
    /// # Safety
    /// Parts that live at the same time, in any thread, must not overlap.
    ///
    /// # Panics
    /// If `range` lies outside.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of {}",
            self.len
        );
        // SAFETY: inside the borrowed slice, as just checked, and disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
