//! Prints how long LPT, round robin and the best conceivable assignment of uneven segments take on equal workers:
//! speed-ups over one worker, and LPT's distance from the lower bound of the makespan.
//!
//! `cargo run -p hypic-router --example balance [workers]`

use std::time::Duration;

use hypic_router::{Balancer, Speed, SpeedConfig};

const PROMPTS: usize = 1_000;
const DEFAULT_WORKERS: usize = 4;

/// Reproducible numbers (xorshift64*).
struct Numbers(u64);

impl Numbers {
    /// In [0, 1).
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// With the given median, 16 % of the values above `spread` times it.
    fn log_normal(&mut self, median: f64, spread: f64) -> f64 {
        let normal: f64 = (0..12).map(|_| self.next()).sum::<f64>() - 6.0;
        median * spread.powf(normal)
    }
}

/// A prompt's lengths of segments, in tokens.
type Draw = fn(&mut Numbers) -> Vec<usize>;

fn log_normal(numbers: &mut Numbers, segments: usize) -> Vec<usize> {
    (0..segments).map(|_| numbers.log_normal(500.0, 2.5).clamp(16.0, 32_768.0) as usize).collect()
}

const DRAWS: [(&str, Draw); 4] = [
    ("16 segments, log-normal", |numbers| log_normal(numbers, 16)),
    ("32 segments, log-normal", |numbers| log_normal(numbers, 32)),
    ("64 segments, log-normal", |numbers| log_normal(numbers, 64)),
    // A long document after every three short ones: the period that round robin cannot see.
    ("32 segments, every fourth long", |numbers| {
        let length = |segment: usize| if segment % 4 == 3 { 2_048.0 } else { 256.0 };
        (0..32).map(|segment| (length(segment) * (0.75 + 0.5 * numbers.next())) as usize).collect()
    }),
];

fn main() {
    let workers: usize = match std::env::args().nth(1).map(|argument| argument.parse()) {
        None => DEFAULT_WORKERS,
        Some(Ok(workers)) if workers > 0 => workers,
        Some(_) => {
            eprintln!("usage: balance [WORKERS], a number above 0");
            std::process::exit(2);
        }
    };
    // At 8k tokens the attention takes as long as all else.
    let speed = Speed { linear: 1e-4, quadratic: 1e-4 / 8_192.0 };
    println!("{workers} workers, {PROMPTS} prompts each; speed-up over one worker (mean)\n");
    println!("| prompt | LPT | round robin | at best | LPT over the lower bound: mean, worst |");
    println!("|---|---|---|---|---|");
    for (name, draw) in DRAWS {
        let mut numbers = Numbers(7);
        let mut sums = [0.0; 4];
        let mut worst: f64 = 0.0;
        for _ in 0..PROMPTS {
            let tokens = draw(&mut numbers);
            let times: Vec<f64> = tokens.iter().map(|&tokens| speed.time(tokens).as_secs_f64()).collect();
            let alone: f64 = times.iter().sum();
            let bound = lower_bound(&times, workers);
            let lpt = lpt(&tokens, workers, speed);
            let in_turn = (0..workers).map(|worker| times.iter().skip(worker).step_by(workers).sum());
            let round_robin = in_turn.fold(0.0, f64::max);
            for (sum, value) in sums.iter_mut().zip([alone / lpt, alone / round_robin, alone / bound, lpt / bound]) {
                *sum += value / PROMPTS as f64;
            }
            worst = worst.max(lpt / bound);
        }
        let [lpt, round_robin, best, excess] = sums;
        println!("| {name} | {lpt:.2}x | {round_robin:.2}x | {best:.2}x | {excess:.3}, {worst:.3} |");
    }
}

/// Makespan in seconds.
fn lpt(tokens: &[usize], workers: usize, speed: Speed) -> f64 {
    let balancer = Balancer::new(SpeedConfig { prior: speed, ..SpeedConfig::default() });
    (0..workers).for_each(|worker| balancer.add_worker(format!("worker-{worker}")).expect("names differ"));
    let _charges = balancer.assign(tokens).expect("there is a worker");
    balancer.loads().iter().map(|load| load.backlog).max().unwrap_or(Duration::ZERO).as_secs_f64()
}

/// No assignment is faster: some worker has at least the mean, one has the longest, and of the longest m + 1 segments
/// two share a worker.
fn lower_bound(times: &[f64], workers: usize) -> f64 {
    let mut longest_first = times.to_vec();
    longest_first.sort_by(|a, b| b.total_cmp(a));
    let mean = times.iter().sum::<f64>() / workers as f64;
    let pair = longest_first.get(workers).map_or(0.0, |next| longest_first[workers - 1] + next);
    mean.max(longest_first.first().copied().unwrap_or(0.0)).max(pair)
}
