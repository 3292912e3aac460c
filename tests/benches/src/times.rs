//! Times of what is compared, taken in turns, and a table of them.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Times of one thing, in milliseconds.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<f64>);

impl Times {
    /// Take one more.
    pub fn add(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1e3);
    }

    /// The least.
    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// The one in the middle.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = if self.min() < 100.0 { 2 } else { 0 };
        write!(f, "{:.digits$} ({:.digits$})", self.median(), self.min())
    }
}

/// What time is taken by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Everybody's.
    Wall,
    /// What the calling thread had of a core, where the system tells, else the wall's.
    Thread,
}

impl Clock {
    fn now(self) -> Duration {
        // Nanoseconds on a core, nanoseconds in a queue, time slices (Linux, proc(5)).
        let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
        let on_core = told.and_then(|line| line.split(' ').next()?.parse().ok());
        match (self, on_core) {
            (Clock::Thread, Some(nanos)) => Duration::from_nanos(nanos),
            _ => START.get_or_init(Instant::now).elapsed(),
        }
    }
}

static START: OnceLock<Instant> = OnceLock::new();

/// Times of several things in turns, after a turn that is not counted.
pub fn alternate<const N: usize>(clock: Clock, rounds: usize, mut work: [&mut dyn FnMut(); N]) -> [Times; N] {
    let mut times = std::array::from_fn(|_| Times::default());
    for round in 0..=rounds {
        for (times, work) in times.iter_mut().zip(&mut work) {
            let begun = clock.now();
            work();
            if round > 0 {
                times.add(clock.now() - begun);
            }
        }
    }
    times
}

/// Rows of text, printed in aligned columns.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new<const N: usize>(headings: [&str; N]) -> Self {
        Table { rows: vec![headings.map(str::to_string).to_vec()] }
    }

    /// One more row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.rows[0].len());
        self.rows.push(cells.to_vec());
    }

    /// Print it under `title`.
    pub fn print(&self, title: &str) {
        println!("\n{title}");
        let widths: Vec<usize> = (0..self.rows[0].len())
            .map(|column| self.rows.iter().map(|row| row[column].len()).max().unwrap_or(0))
            .collect();
        for row in &self.rows {
            let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
            println!("  {}", cells.join("  "));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_least_are_those_of_the_times() {
        let mut times = Times::default();
        for ms in [5, 1, 9] {
            times.add(Duration::from_millis(ms));
        }
        assert_eq!((times.min(), times.median()), (1.0, 5.0));
        assert_eq!(times.to_string(), "5.00 (1.00)");
    }

    #[test]
    fn turns_alternate_and_the_first_is_not_counted() {
        let order = std::cell::RefCell::new(Vec::new());
        let [a, b] =
            alternate(Clock::Wall, 2, [&mut || order.borrow_mut().push('a'), &mut || order.borrow_mut().push('b')]);
        assert_eq!(order.into_inner(), ['a', 'b', 'a', 'b', 'a', 'b']);
        assert_eq!((a.0.len(), b.0.len()), (2, 2));
    }
}
