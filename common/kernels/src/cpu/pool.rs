//! The threads of a backend (rayon's), and slices that their tasks write to.
//!
//! The caller takes part in its own work and the pool's threads help as they wake up: whoever is free takes the
//! next task. The panic of a task goes on in the caller, once all threads are out of its work.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Work below this many floating-point operations is not worth waking another thread for.
const FLOPS_PER_TASK: usize = 1_000_000;

/// The threads of one backend.
#[derive(Clone)]
pub(super) struct Pool {
    helpers: Option<Arc<rayon::ThreadPool>>,
    threads: usize,
}

impl Pool {
    /// `threads` counts the caller's; one thread means that everything runs on the caller's.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        let helpers = (threads > 1).then(|| {
            let builder = rayon::ThreadPoolBuilder::new().num_threads(threads - 1);
            let built = builder.thread_name(|i| format!("hypic-cpu-{i}")).build();
            Arc::new(built.expect("the system can start threads"))
        });
        Pool { helpers, threads }
    }

    /// How many threads `flops` operations are worth.
    pub fn split(&self, flops: usize) -> usize {
        self.threads.min(flops / FLOPS_PER_TASK + 1)
    }

    /// Run `task(i)` for `i` in `0..tasks`, in parallel if `flops` in all are worth it. `task` must not
    /// depend on which thread runs it, or in which order.
    pub fn run(&self, tasks: usize, flops: usize, task: impl Fn(usize) + Sync + Send) {
        let threads = self.split(flops).min(tasks);
        let Some(helpers) = self.helpers.as_ref().filter(|_| threads > 1) else {
            return (0..tasks).for_each(task);
        };
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= tasks {
                    return;
                }
                task(i);
            }
        };
        helpers.in_place_scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|_| work());
            }
            work();
        });
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
        Shared { start: slice.as_mut_ptr(), len: slice.len(), _slice: PhantomData }
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
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: inside the borrowed slice, as just checked, and disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Enough operations for any number of threads.
    const MANY: usize = 1 << 40;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 3, 64, 1000] {
                let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..50 {
                    pool.run(tasks, MANY, |i| _ = runs[i].fetch_add(1, Ordering::Relaxed));
                }
                assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 50), "{threads}, {tasks}");
            }
        }
    }

    #[test]
    fn others_take_part_again_after_they_have_slept() {
        let pool = Pool::new(2);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(5));
            let together = std::sync::Barrier::new(2);
            // Each task waits for the other, so two threads must be at it.
            pool.run(2, MANY, |_| _ = together.wait());
        }
    }

    #[test]
    fn callers_in_several_threads_and_within_tasks_all_finish() {
        let pool = Pool::new(3);
        let done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        pool.run(3, MANY, |_| pool.run(2, MANY, |_| _ = done.fetch_add(1, Ordering::Relaxed)));
                    }
                });
            }
        });
        assert_eq!(done.into_inner(), 4 * 100 * 3 * 2);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(2);
        for panicking in 0..8 {
            let run = || pool.run(8, MANY, |i| assert_ne!(i, panicking, "task at fault"));
            let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("a task panicked");
            let message = panic.downcast_ref::<String>().expect("a message");
            assert!(message.contains("task at fault"), "{message}");
        }
        let done = AtomicUsize::new(0);
        pool.run(8, MANY, |_| _ = done.fetch_add(1, Ordering::Relaxed));
        assert_eq!(done.into_inner(), 8);
    }
}
