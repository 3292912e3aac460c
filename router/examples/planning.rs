//! Prints the router's own time per request, without template and tokenization: prompts of 64 segments over 8 workers and
//! 4 combiners that hold a million entries, at rest and while a member's copy is emptied and filled again and again.
//!
//! `cargo run --release -p hypic-router --example planning [requests]`

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use hypic_cache::{EntryKey, Fingerprint, KeySpace, PrefixKey};
use hypic_proto::v1::directory_update::Update;
use hypic_proto::v1::{DirectoryInsert, DirectorySnapshot, DirectoryUpdate};
use hypic_router::{
    Anchor, Engine, Fleet, ModelCard, Prompt, PromptOptions, Request, Router, RouterConfig, Sampling, Served, View,
};
use hypic_state::{ComposeRule, DType};
use hypic_transport::grpc::Holdings;
use hypic_transport::{Combine, CombineLoad, JobError, JobOutcome, Plan, PrefillJob, PrefixHit, Scatter};

const ENTRIES: usize = 1_000_000;
const WORKERS: usize = 8;
const COMBINERS: usize = 4;
const SEGMENTS: usize = 64;
const SEGMENT_TOKENS: usize = 512;
const QUERY_TOKENS: usize = 64;
const DEFAULT_REQUESTS: usize = 2_000;
/// Segments that prompts are made of; three quarters of them are held by somebody.
const POOL: usize = 4_096;
const VOCAB: usize = 150_000;
const SEAM: usize = 8;

/// Reproducible numbers (xorshift64*).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        ((self.next() >> 33) as usize) % bound
    }

    fn tokens(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(VOCAB) as u32).collect()
    }

    fn key(&mut self) -> [u8; 32] {
        let mut key = [0; 32];
        key.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&self.next().to_le_bytes()));
        key
    }
}

/// A member that takes everything and does nothing.
struct Member {
    id: String,
    holdings: Arc<Holdings>,
    /// Plans that it has.
    plans: std::sync::Mutex<Vec<Plan>>,
}

impl Scatter for Member {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_running(&self) -> bool {
        true
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.holdings.has(key)
    }

    fn prefill(&self, _: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        futures::future::pending().boxed()
    }
}

impl Combine for Member {
    fn id(&self) -> &str {
        &self.id
    }

    fn is_running(&self) -> bool {
        true
    }

    fn load(&self) -> CombineLoad {
        CombineLoad::default()
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.holdings.has(key)
    }

    fn prefix_lengths(&self, root: PrefixKey) -> Vec<usize> {
        self.holdings.prefix_lengths(root)
    }

    fn prefix(&self, keys: &[PrefixKey]) -> Option<PrefixHit> {
        keys.iter().find_map(|key| self.holdings.prefix(*key))
    }

    fn prefix_room(&self, _: usize) -> (usize, usize) {
        (1 << 20, 1 << 30)
    }

    fn generate(&self, plan: Plan) {
        self.plans.lock().expect("no panic").push(plan);
    }

    fn prefill(&self, _: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        futures::future::pending().boxed()
    }
}

fn fill(holdings: &Holdings, keys: &[[u8; 32]]) {
    for keys in keys.chunks(16_384) {
        let insert = |key: &[u8; 32]| DirectoryInsert {
            key: bytes::Bytes::copy_from_slice(key),
            tokens: SEGMENT_TOKENS as u32,
            bytes: 4 << 20,
        };
        let snapshot = DirectorySnapshot { entries: keys.iter().map(insert).collect(), ..Default::default() };
        let update = DirectoryUpdate { incarnation: 1, sequence: 0, update: Some(Update::Snapshot(snapshot)) };
        holdings.apply(update).expect("a snapshot");
    }
}

/// The middle one, and that which one of a hundred exceeds.
fn middle_and_tail(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    format!("{:.0} | {:.0}", at(0.5), at(0.99))
}

fn main() {
    let requests: usize = match std::env::args().nth(1).map(|argument| argument.parse()) {
        None => DEFAULT_REQUESTS,
        Some(Ok(requests)) if requests > 0 => requests,
        Some(_) => {
            eprintln!("usage: planning [REQUESTS], a number above 0");
            std::process::exit(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _inside = runtime.enter();
    let mut numbers = Numbers(7);
    let space = KeySpace::new(Fingerprint([7; 32]), DType::F32);
    let pool: Vec<Vec<u32>> = (0..POOL).map(|_| numbers.tokens(SEGMENT_TOKENS)).collect();

    let fleet = Arc::new(Fleet::new(View::default()));
    let member = |id: String| Arc::new(Member { holdings: fleet.index().member(&id), id, plans: Default::default() });
    let workers: Vec<Arc<Member>> = (0..WORKERS).map(|i| member(format!("worker-{i}"))).collect();
    let combiners: Vec<Arc<Member>> = (0..COMBINERS).map(|i| member(format!("combiner-{i}"))).collect();
    fleet.set(View {
        scatter: workers.iter().map(|w| w.clone() as Arc<dyn Scatter>).collect(),
        combiners: combiners.iter().map(|c| c.clone() as Arc<dyn Combine>).collect(),
    });
    // Every entry is at one worker, every fourth at a combiner too.
    let mut held: Vec<Vec<[u8; 32]>> = vec![Vec::new(); WORKERS + COMBINERS];
    let anchored = |tokens: &Vec<u32>| *EntryKey::new(&space, SEAM, &[], b"", tokens).as_bytes();
    let known = pool.iter().take(POOL * 3 / 4).map(anchored).collect::<Vec<_>>();
    let others = (known.len()..ENTRIES).map(|_| numbers.key()).collect::<Vec<_>>();
    for (i, key) in known.iter().chain(&others).enumerate() {
        held[i % WORKERS].push(*key);
        if i % 4 == 0 {
            held[WORKERS + (i / 4) % COMBINERS].push(*key);
        }
    }
    let before = Instant::now();
    for (member, keys) in workers.iter().chain(&combiners).zip(&held) {
        fill(&member.holdings, keys);
    }
    println!("{} entries noted in {:.2} s", fleet.index().entries(), before.elapsed().as_secs_f64());

    let served = Served {
        card: ModelCard { id: "m".into(), created: 0, context: 1 << 20 },
        space,
        vocab: VOCAB,
        reusable: None,
        compose: ComposeRule::Transition,
        eos: Arc::new([]),
        sampling: Sampling::default(),
    };
    let config = RouterConfig { seam: SEAM, anchor: Anchor::None, ..RouterConfig::default() };
    let router = Router::new(config, served, None, fleet.clone());
    let mut prompt = || {
        let segments = (0..SEGMENTS).map(|_| pool[numbers.below(POOL)].clone()).collect();
        (segments, numbers.tokens(QUERY_TOKENS))
    };

    println!("\nmicroseconds for {requests} prompts of {SEGMENTS} x {SEGMENT_TOKENS} tokens: median | 99 of 100\n");
    println!("| | median | p99 |\n|---|---|---|");
    let mut measure = |name: &str| {
        let (mut keying, mut planning, mut whole) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..requests + requests / 10 {
            let (segments, query): (Vec<Vec<u32>>, Vec<u32>) = prompt();
            let request = Request {
                prompt: Prompt::Tokens { segments, query, anchor: None },
                options: PromptOptions::default(),
                sampling: Sampling::default(),
                n: 1,
                max_tokens: Some(1),
                stop: Vec::new(),
                stop_at_eos: true,
                logprobs: None,
                deadline: None,
                tenant: None,
            };
            let times = router.rehearse(&request).expect("a plan");
            let before = Instant::now();
            let answer = runtime.block_on(router.generate(request)).expect("taken");
            let took = before.elapsed();
            // The client goes, and with it all that was begun.
            drop(answer);
            runtime.block_on(async {
                for _ in 0..8 {
                    tokio::task::yield_now().await;
                }
            });
            combiners.iter().for_each(|combiner| combiner.plans.lock().expect("no panic").clear());
            // The first ones warm up.
            if i >= requests / 10 {
                keying.push(times.keying);
                planning.push(times.planning);
                whole.push(took);
            }
        }
        println!("| {name}: keying | {} |", middle_and_tail(keying));
        println!("| {name}: lookup and planning | {} |", middle_and_tail(planning));
        println!("| {name}: a request, handing it out included | {} |", middle_and_tail(whole));
    };
    measure("at rest");

    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (changing, keys) = (&workers[0].holdings, &held[0]);
        let changes = scope.spawn(|| {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                changing.clear();
                fill(changing, keys);
                rounds += 1;
                std::thread::sleep(Duration::from_millis(50));
            }
            rounds
        });
        measure("a member lost and back");
        stop.store(true, Ordering::Relaxed);
        let rounds: usize = changes.join().expect("no panic");
        println!("\na member of {} entries was lost and came back {rounds} times meanwhile", held[0].len());
    });
}
