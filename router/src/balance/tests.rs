use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use super::*;

/// One microsecond per token and no quadratic share, so that makespans can be counted in tokens.
fn per_token() -> SpeedConfig {
    SpeedConfig { prior: Speed { linear: 1e-6, quadratic: 0.0 }, ..SpeedConfig::default() }
}

fn fleet(config: SpeedConfig, workers: usize) -> Balancer {
    let balancer = Balancer::new(config);
    (0..workers).for_each(|worker| balancer.add_worker(format!("worker-{worker}")).unwrap());
    balancer
}

fn backlogs(balancer: &Balancer) -> Vec<Duration> {
    balancer.loads().iter().map(|load| load.backlog).collect()
}

/// Reproducible numbers below `bound` (xorshift64*).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound as u64) as usize
    }

    /// Skewed as documents are: many short, few long.
    fn uneven(&mut self) -> usize {
        let magnitude = 5 + self.below(7);
        (1 << magnitude) + self.below(1 << magnitude)
    }
}

/// Makespan in tokens of LPT on idle workers of one speed.
fn lpt(tokens: &[usize], workers: usize) -> usize {
    let balancer = fleet(per_token(), workers);
    let assignments = balancer.assign(tokens).unwrap();
    let mut segments: Vec<usize> = assignments.iter().map(|assignment| assignment.segment).collect();
    segments.sort_unstable();
    assert!(segments.into_iter().eq(0..tokens.len()), "every segment once");
    backlogs(&balancer).iter().max().unwrap().as_micros() as usize
}

fn round_robin(tokens: &[usize], workers: usize) -> usize {
    (0..workers).map(|worker| tokens.iter().skip(worker).step_by(workers).sum()).max().unwrap()
}

/// The best makespan, by trying every assignment that is not worse than the best one found.
fn optimum(tokens: &[usize], loads: &mut [usize], best: &mut usize) {
    let Some((&first, rest)) = tokens.split_first() else {
        *best = (*best).min(*loads.iter().max().unwrap());
        return;
    };
    for worker in 0..loads.len() {
        // Workers with equal loads are interchangeable.
        if loads[worker] + first < *best && !loads[..worker].contains(&loads[worker]) {
            loads[worker] += first;
            optimum(rest, loads, best);
            loads[worker] -= first;
        }
    }
}

#[test]
fn makespans_stay_within_grahams_bound() {
    let mut numbers = Numbers(1);
    let mut ratios = Vec::new();
    for instance in 0..400 {
        let workers = 2 + instance % 3;
        let tokens: Vec<usize> = (0..1 + numbers.below(10)).map(|_| numbers.uneven()).collect();
        let mut best = usize::MAX;
        optimum(&tokens, &mut vec![0; workers], &mut best);
        let ratio = lpt(&tokens, workers) as f64 / best as f64;
        let bound = 4.0 / 3.0 - 1.0 / (3.0 * workers as f64);
        assert!((1.0..=bound).contains(&ratio), "{ratio:.3} of the best on {workers} workers: {tokens:?}");
        ratios.push(ratio);
    }
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    assert!(mean < 1.02, "mean ratio to the best makespan {mean:.4}");
}

#[test]
fn the_worst_case_of_the_bound_is_met_and_not_exceeded() {
    // Graham's example for 2 workers: best 6, LPT 7.
    assert_eq!(lpt(&[3, 3, 2, 2, 2], 2), 7);
}

#[test]
fn uneven_segments_take_far_longer_round_robin() {
    let mut numbers = Numbers(2);
    let (mut balanced, mut in_turn, mut bound) = (0, 0, 0);
    for _ in 0..200 {
        let tokens: Vec<usize> = (0..32).map(|_| numbers.uneven()).collect();
        balanced += lpt(&tokens, 4);
        in_turn += round_robin(&tokens, 4);
        bound += tokens.iter().sum::<usize>().div_ceil(4).max(*tokens.iter().max().unwrap());
    }
    let (gain, excess) = (in_turn as f64 / balanced as f64, balanced as f64 / bound as f64);
    println!("round robin takes {gain:.2} times as long; LPT takes {excess:.3} times the lower bound");
    assert!(gain > 1.3, "{gain}");
    assert!(excess < 1.05, "{excess}");
}

#[test]
fn the_longest_goes_first_and_the_backlog_counts() {
    let balancer = fleet(per_token(), 2);
    let earlier = balancer.assign(&[50]).unwrap();
    let assignments = balancer.assign(&[10, 40, 20, 0]).unwrap();
    let placed: Vec<_> = assignments.iter().map(|a| (a.segment, a.worker.as_str())).collect();
    assert_eq!(placed, [(1, "worker-1"), (2, "worker-1"), (0, "worker-0"), (3, "worker-0")]);
    assert_eq!(assignments[0].estimate, Duration::from_micros(40));
    assert_eq!(assignments[0].charge.estimate(), Duration::from_micros(40));
    drop(assignments);
    assert_eq!(backlogs(&balancer), [Duration::from_micros(50), Duration::ZERO]);
    drop(earlier);
    assert_eq!(backlogs(&balancer), [Duration::ZERO; 2]);
}

#[test]
fn the_attention_share_makes_long_segments_dearer() {
    let balancer = fleet(SpeedConfig { prior: Speed { linear: 1e-6, quadratic: 1e-9 }, ..per_token() }, 2);
    // 3000 tokens take 12 ms, 2000 take 6, 1000 take 2: by tokens alone the halves would be 3000 and 3 x 1000.
    let assignments = balancer.assign(&[1000, 1000, 1000, 3000, 2000]).unwrap();
    let of_first = assignments.iter().filter(|assignment| assignment.worker.as_str() == "worker-0");
    assert_eq!(of_first.map(|assignment| assignment.segment).collect::<Vec<_>>(), [3]);
    assert_eq!(balancer.estimate("worker-0", 3000), Some(Duration::from_millis(12)));
    assert_eq!(balancer.estimate("nobody", 3000), None);
}

#[test]
fn a_faster_worker_gets_more() {
    let balancer = fleet(per_token(), 3);
    for assignment in balancer.assign(&[100; 30]).unwrap() {
        // The second worker is three times as fast as the others.
        let time = if assignment.worker.as_str() == "worker-1" { 100 } else { 300 };
        assignment.charge.complete(Duration::from_micros(time));
    }
    let assignments = balancer.assign(&[100; 50]).unwrap();
    let share = |worker: &str| assignments.iter().filter(|assignment| assignment.worker.as_str() == worker).count();
    assert_eq!([share("worker-0"), share("worker-1"), share("worker-2")], [10, 30, 10]);
    let times = backlogs(&balancer);
    assert!(
        times.iter().all(|time| time.abs_diff(Duration::from_micros(3000)) < Duration::from_micros(2)),
        "{times:?}"
    );
}

#[test]
fn a_worker_without_measurements_is_taken_for_an_average_one() {
    let balancer = fleet(per_token(), 1);
    for assignment in balancer.assign(&[100; 5]).unwrap() {
        assignment.charge.complete(Duration::from_millis(1));
    }
    balancer.add_worker("new").unwrap();
    // By the configured speed it would be ten times as fast as the other.
    assert_eq!(balancer.estimate("new", 100), balancer.estimate("worker-0", 100));
    let loads = balancer.loads();
    assert_eq!((loads[0].measured, loads[1].measured), (5, 0));
}

#[test]
fn charges_are_given_back_once_however_the_work_ends() {
    let balancer = fleet(per_token(), 1);
    let mut charges = balancer.assign(&[100, 200, 300]).unwrap().into_iter().map(|assignment| assignment.charge);
    let load = |balancer: &Balancer| (backlogs(balancer)[0].as_micros(), balancer.loads()[0].segments);
    assert_eq!(load(&balancer), (600, 3));
    charges.next().unwrap().complete(Duration::from_micros(3000));
    // What was charged goes back, and not what it would be charged with by now.
    assert_eq!(load(&balancer), (300, 2));
    drop(charges.next());
    assert_eq!(load(&balancer), (100, 1));
    let charge = charges.next().unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _held = charge;
        panic!("the work fails");
    }));
    assert!(panicked.is_err());
    assert_eq!(load(&balancer), (0, 0));
    assert_eq!(balancer.assign(&[1]).unwrap().len(), 1, "usable after a panic");
}

#[test]
fn charges_of_a_removed_worker_are_inert() {
    let balancer = fleet(per_token(), 2);
    let old = balancer.assign(&[100; 4]).unwrap();
    assert!(balancer.remove_worker("worker-0"));
    assert!(!balancer.remove_worker("worker-0"));
    balancer.add_worker("worker-0").unwrap();
    let fresh = balancer.assign(&[70]).unwrap();
    assert_eq!(fresh[0].worker.as_str(), "worker-0", "it comes back idle");
    for assignment in old {
        assignment.charge.complete(Duration::from_secs(1));
    }
    let loads = balancer.loads();
    let by_name = |name: &str| loads.iter().find(|load| load.worker.as_str() == name).unwrap();
    assert_eq!(by_name("worker-0").backlog, Duration::from_micros(70));
    assert_eq!((by_name("worker-0").measured, by_name("worker-1").measured), (0, 2));
    assert_eq!(by_name("worker-1").backlog, Duration::ZERO);
}

#[test]
fn no_worker_is_an_error_that_says_why() {
    let balancer = fleet(per_token(), 0);
    let error = balancer.assign(&[5, 6]).unwrap_err();
    assert_eq!(error, BalanceError::NoWorker { segments: 2, known: 0, excluded: 0 });
    assert!(balancer.assign(&[]).unwrap().is_empty());
    balancer.add_worker("a").unwrap();
    balancer.add_worker("b").unwrap();
    assert_eq!(balancer.add_worker("a"), Err(BalanceError::DuplicateWorker("a".into())));
    let only = balancer.assign_excluding(&[5, 6, 7], &["a".into()]).unwrap();
    assert!(only.iter().all(|assignment| assignment.worker.as_str() == "b"));
    drop(only);
    let error = balancer.assign_excluding(&[5], &["a".into(), "b".into(), "c".into()]).unwrap_err();
    assert_eq!(error, BalanceError::NoWorker { segments: 1, known: 2, excluded: 2 });
    assert_eq!(backlogs(&balancer), [Duration::ZERO; 2], "a refused list charges nobody");
}

#[test]
fn loads_return_to_zero_under_concurrent_use() {
    let balancer = fleet(SpeedConfig::default(), 3);
    thread::scope(|scope| {
        for seed in 1..5 {
            let balancer = balancer.clone();
            scope.spawn(move || {
                let mut numbers = Numbers(seed);
                let mut held = Vec::new();
                for round in 0..300 {
                    let tokens: Vec<usize> = (0..numbers.below(6)).map(|_| numbers.uneven()).collect();
                    held.extend(balancer.assign(&tokens).unwrap());
                    while held.len() > 8 {
                        let assignment = held.swap_remove(numbers.below(held.len()));
                        if numbers.below(2) == 0 {
                            assignment.charge.complete(Duration::from_micros(numbers.below(10_000) as u64));
                        }
                    }
                    if seed == 1 && round % 50 == 49 {
                        balancer.remove_worker("worker-0");
                        balancer.add_worker("worker-0").unwrap();
                    }
                }
            });
        }
    });
    for load in balancer.loads() {
        assert_eq!((load.backlog, load.segments), (Duration::ZERO, 0), "{}", load.worker);
    }
}

/// A worker's model after `jobs` of uneven lengths that take `truth` times a noise between 0.9 and 1.1.
fn learned(truth: Speed, jobs: usize, config: &SpeedConfig) -> SpeedModel {
    let mut model = SpeedModel::new(config);
    let mut numbers = Numbers(9);
    for _ in 0..jobs {
        let tokens = numbers.uneven() * 8;
        let noise = 0.9 + numbers.below(200) as f64 / 1000.0;
        model.learn(tokens, truth.time(tokens).mul_f64(noise), config);
    }
    model
}

fn assert_close(model: &SpeedModel, truth: Speed, tokens: usize, tolerance: f64) {
    let ratio = model.speed().time(tokens).as_secs_f64() / truth.time(tokens).as_secs_f64();
    assert!((ratio - 1.0).abs() < tolerance, "{tokens} tokens: {ratio:.3} times the true time");
}

#[test]
fn both_shares_are_learned_from_uneven_jobs() {
    let config = SpeedConfig::default();
    let prior = config.prior;
    for (linear, quadratic) in [(1.0, 1.0), (20.0, 20.0), (0.05, 0.2), (3.0, 0.5), (1.0, 0.0)] {
        let truth = Speed { linear: prior.linear * linear, quadratic: prior.quadratic * quadratic };
        let model = learned(truth, 200, &config);
        for tokens in [256, 2_048, 16_384, 32_768] {
            assert_close(&model, truth, tokens, 0.1);
        }
    }
}

#[test]
fn jobs_of_one_length_scale_the_prior() {
    let config = SpeedConfig::default();
    let truth = Speed { linear: config.prior.linear * 7.0, quadratic: config.prior.quadratic * 7.0 };
    let mut model = SpeedModel::new(&config);
    model.learn(512, truth.time(512), &config);
    // One job is enough, and says as much of other lengths as the prior's shape allows.
    for tokens in [16, 512, 100_000] {
        assert_close(&model, truth, tokens, 1e-6);
    }
    (0..100).for_each(|_| model.learn(512, truth.time(512), &config));
    assert_close(&model, truth, 100_000, 1e-6);
}

#[test]
fn one_odd_measurement_moves_little_and_a_change_of_speed_is_followed() {
    let config = SpeedConfig::default();
    let truth = Speed { linear: 3e-4, quadratic: 2e-8 };
    for odd in [1e-4, 1e4] {
        let mut model = learned(truth, 100, &config);
        model.learn(1024, truth.time(1024).mul_f64(odd), &config);
        assert_close(&model, truth, 1024, 0.2);
    }
    let mut model = learned(truth, 100, &config);
    model.learn(0, Duration::from_secs(1), &config);
    model.learn(100, Duration::ZERO, &config);
    assert_eq!(model.measured(), 100, "such jobs say nothing");
    let slower = Speed { linear: truth.linear * 5.0, quadratic: truth.quadratic * 5.0 };
    for _ in 0..20 {
        [300, 3_000, 9_000].iter().for_each(|&tokens| model.learn(tokens, slower.time(tokens), &config));
    }
    assert_close(&model, slower, 3_000, 0.25);
}

/// `worker` sends an entry so often, with nothing else to do.
fn send(balancer: &Balancer, worker: &str, times: usize, takes: Duration) {
    let charge = || balancer.charge_time(worker, Duration::ZERO).expect("known");
    (0..times).for_each(|_| charge().sent(1_000, 10_000_000, takes));
}

/// Links of 1 GB/s and entries of 10 kB per token.
fn linked(workers: usize) -> Balancer {
    let balancer = fleet(SpeedConfig::default(), workers);
    let latency = Duration::from_micros(100);
    balancer.set_links(LinkConfig { latency, bytes_per_second: 1e9, bytes_per_token: 1e4, ..LinkConfig::FREE });
    balancer
}

/// Who gets a few segments, each of which takes 0.1 s to compute.
fn busy(balancer: &Balancer) -> Vec<String> {
    let mut workers: Vec<String> =
        balancer.assign(&[1_000; 4]).expect("a worker").iter().map(|a| a.worker.to_string()).collect();
    workers.sort_unstable();
    workers.dedup();
    workers
}

#[test]
fn a_slow_link_makes_a_worker_later_than_its_speed_does() {
    let balancer = linked(2);
    let sending = |worker: &str| balancer.sending(worker, 0, Some(1 << 20)).expect("known");
    assert_eq!(sending("worker-0"), sending("worker-1"), "as configured");
    // A worker that was not measured is taken to be like the others.
    send(&balancer, "worker-0", 20, Duration::from_secs(1));
    assert!(sending("worker-1") > Duration::from_millis(50));
    send(&balancer, "worker-1", 60, Duration::from_millis(10));
    assert!(sending("worker-0") > 20 * sending("worker-1"));
    let rates: Vec<f64> = balancer.loads().iter().map(|load| load.bytes_per_second).collect();
    assert!((1e7..2e7).contains(&rates[0]) && rates[1] > 5e8, "{rates:?}");
    // A second to send and 0.1 s to compute, or 10 ms and 0.1 s.
    assert_eq!(busy(&balancer), ["worker-1"]);
    assert!(balancer.sending("worker-9", 1, None).is_none());
}

#[test]
fn a_first_transfer_that_stalls_costs_a_worker_no_work() {
    let balancer = linked(2);
    send(&balancer, "worker-0", 1, Duration::from_secs(10));
    assert_eq!(busy(&balancer), ["worker-0", "worker-1"]);
}

#[tokio::test(start_paused = true)]
async fn a_link_that_was_slow_is_tried_again_in_time() {
    let balancer = linked(2);
    send(&balancer, "worker-0", 30, Duration::from_secs(1));
    send(&balancer, "worker-1", 100, Duration::from_millis(10));
    assert_eq!(busy(&balancer), ["worker-1"]);
    tokio::time::advance(10 * LinkConfig::FREE.fade).await;
    assert_eq!(busy(&balancer), ["worker-0", "worker-1"]);
}

#[test]
fn transfers_that_share_a_link_say_nothing_of_it() {
    let balancer = linked(1);
    let rate = || balancer.loads()[0].bytes_per_second;
    let charge = || balancer.charge_time("worker-0", Duration::ZERO).expect("known");
    let slow = Duration::from_millis(30);
    let (first, second) = (charge(), charge());
    for shared in [first, second] {
        shared.sent(1_000, 10_000_000, slow);
    }
    let first = charge();
    drop(charge());
    first.sent(1_000, 10_000_000, slow);
    assert_eq!(rate(), 1e9, "of the second one's time some was the first one's");
    drop(first);
    charge().sent(1_000, 10_000_000, slow);
    assert!(rate() < 5e8, "{}", rate());
}

/// What a worker is heard to tell just now.
fn now(tokens: u64) -> ToldBacklog {
    ToldBacklog { tokens, heard: tokio::time::Instant::now().into_std() }
}

#[tokio::test(start_paused = true)]
async fn what_a_worker_does_for_others_counts() {
    let (balancer, told) = (fleet(per_token(), 2), Arc::new(Mutex::new(None)));
    let ask = told.clone();
    assert!(balancer.ask_backlog("worker-0", move || *ask.lock()));
    assert!(!balancer.ask_backlog("nobody", || None));
    let hear = |tokens| *told.lock() = Some(now(tokens));
    let backlog = || balancer.backlog("worker-0").map(|backlog| backlog.as_micros());
    assert_eq!(backlog(), Some(0), "it has told nothing");
    hear(1_000);
    assert_eq!(backlog(), Some(1_000));
    assert_eq!(balancer.soonest(100, &[]), Some(Duration::from_micros(100)), "at the other one");
    assert_eq!(balancer.soonest(100, &["worker-1".into()]), Some(Duration::from_micros(1_100)));
    let given = balancer.assign(&[600, 500, 400]).expect("a worker");
    let placed: Vec<_> = given.iter().map(|a| (a.segment, a.worker.as_str())).collect();
    assert_eq!(placed, [(0, "worker-1"), (1, "worker-1"), (2, "worker-0")]);

    // What it was given here is not counted twice, once it tells of that too.
    hear(1_400);
    assert_eq!((backlog(), balancer.others("worker-0")), (Some(1_400), Some(Duration::from_micros(1_000))));
    hear(400);
    assert_eq!((backlog(), balancer.others("worker-0")), (Some(400), Some(Duration::ZERO)));
    // It is done, and what it told is old: however old, if its heartbeats are that far apart.
    drop(given);
    for _ in 0..3 {
        assert_eq!(backlog(), Some(0));
        tokio::time::advance(Duration::from_secs(100)).await;
    }
    hear(400);
    assert_eq!(backlog(), Some(400), "by now somebody else's");
}

#[tokio::test(start_paused = true)]
async fn work_for_others_is_taken_for_usual_segments() {
    let balancer = fleet(SpeedConfig { prior: Speed { linear: 1e-6, quadratic: 1e-9 }, ..per_token() }, 1);
    drop(balancer.assign(&[1_000; 3]));
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(balancer.ask_backlog("worker-0", || Some(now(10_000))));
    // 1000 tokens take 2 ms; 10000 in one piece would take 110.
    assert_eq!(balancer.others("worker-0"), Some(Duration::from_millis(20)));
}
