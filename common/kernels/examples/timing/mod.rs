//! Times of repeated work, for the programs that print rates.

use std::time::{Duration, Instant};

/// The shortest time of `work`, which is repeated for about `span` after a first time that does not count.
pub fn fastest(span: Duration, mut work: impl FnMut()) -> Duration {
    work();
    let begin = Instant::now();
    let mut best = Duration::MAX;
    while begin.elapsed() < span {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed());
    }
    best
}
