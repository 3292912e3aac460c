//! Requests over members that fail as a test tells them, on a clock that the test moves.

mod failover;
mod segments;
mod stats;

use std::time::Duration;

use hypic_state::ComposeRule;
use hypic_text::{StopMatcher, Tokenized};
use hypic_transport::{Combine, Plan, SamplingParams, Scatter};

use super::*;
use crate::api::{Mode, Report};
use crate::faults::FaultConfig;
use crate::fleet::{Fleet, View};
use crate::plan::Settings;
use crate::router::RouterConfig;
use crate::testing::{Act, TestCombiner, TestWorker, space};

const SEAM: usize = 4;
const EOS: u32 = 2;

struct Bench {
    core: Arc<Core>,
    workers: Vec<Arc<TestWorker>>,
    combiners: Vec<Arc<TestCombiner>>,
}

impl Bench {
    /// A worker for each list of acts.
    fn new(acts: &[&[Act]], combiners: usize, faults: FaultConfig) -> Self {
        let workers: Vec<_> = acts.iter().enumerate().map(|(i, a)| TestWorker::new(format!("worker-{i}"), a)).collect();
        let combiners: Vec<_> = (0..combiners).map(|i| TestCombiner::new(format!("combiner-{i}"))).collect();
        let config = RouterConfig { faults, ..RouterConfig::default() };
        let core = Arc::new(Core::new(config, space(), Arc::new(Fleet::new(View::default()))));
        let bench = Bench { core, workers, combiners };
        bench.show();
        bench
    }

    /// Let the router see all members.
    fn show(&self) {
        self.core.fleet.set(View {
            scatter: self.workers.iter().map(|w| w.clone() as Arc<dyn Scatter>).collect(),
            combiners: self.combiners.iter().map(|c| c.clone() as Arc<dyn Combine>).collect(),
        });
    }

    fn ask(&self, ask: Ask) -> Client {
        let text = TextSide::new(None, &StopMatcher::new(Vec::new()).expect("no stops"), ask.choices.len());
        let (sender, events) = mpsc::channel(64);
        let running = Running::start(self.core.clone(), ask, text, Progress::default()).expect("a combiner");
        tokio::spawn(running.drive(sender));
        Client { events, since: tokio::time::Instant::now() }
    }

    /// Fails unless everything that requests held is given back.
    async fn settled(&self) {
        let at_rest = || {
            let backlog: usize = self.core.fleet.balancer().loads().iter().map(|l| l.segments).sum();
            let plans: usize = self.combiners.iter().map(|c| self.core.fleet.plans(&c.id)).sum();
            (backlog, plans, self.core.flights.len()) == (0, 0, 0)
        };
        until(at_rest).await;
    }
}

/// Wait for something that must come to pass.
async fn until(condition: impl Fn() -> bool) {
    for _ in 0..100_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("it does not come to pass");
}

struct Client {
    events: mpsc::Receiver<Event>,
    since: tokio::time::Instant,
}

/// All that a client was told.
struct Told {
    tokens: Vec<Vec<u32>>,
    finished: Vec<(u32, FinishReason)>,
    end: Result<Report, Error>,
}

impl Client {
    async fn rest(&mut self) -> Told {
        let (mut tokens, mut finished) = (vec![Vec::new(); 2], Vec::new());
        loop {
            match self.events.recv().await.expect("a last event") {
                Event::Delta(delta) => tokens[delta.choice as usize].extend(delta.token_ids),
                Event::Finished { choice, reason } => finished.push((choice, reason)),
                Event::Report(report) => return Told { tokens, finished, end: Ok(report) },
                Event::Failed(error) => return Told { tokens, finished, end: Err(error) },
            }
        }
    }

    async fn report(&mut self) -> Report {
        self.rest().await.end.expect("an answer")
    }

    async fn error(&mut self) -> Error {
        let told = self.rest().await;
        assert!(told.finished.is_empty(), "an error is no reason to finish");
        told.end.expect_err("a failure")
    }

    fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }
}

/// A prompt of these segments, for one answer.
fn ask(segments: &[Vec<u32>]) -> Ask {
    let sampling = SamplingParams { seed: 7, ..SamplingParams::default() };
    Ask {
        settings: Settings {
            request: "r".into(),
            mode: Mode::Hypic,
            rule: ComposeRule::Transition,
            seam: SEAM,
            anchor: Arc::new([100, 101]),
            salt: Arc::new([]),
            deadline: None,
        },
        tokens: Tokenized { segments: segments.to_vec(), query: vec![1], message_ends: Vec::new() },
        prompt_ids: Vec::new(),
        choices: vec![sampling],
        eos: Arc::new([EOS]),
        max_tokens: 10,
        arrived: tokio::time::Instant::now().into_std(),
    }
}

fn ids(from: u32, n: u32) -> Vec<u32> {
    (from..from + n).collect()
}

fn tell(plan: &Plan, event: GenerationEvent) {
    plan.events.send(event).expect("the router listens");
}

fn token(plan: &Plan, choice: usize, token: u32) {
    tell(plan, GenerationEvent::Token(TokenEvent { choice, token, logprob: None, top: Vec::new() }));
}

/// The combiner has all entries, and all answers end.
fn complete(plan: &Plan) {
    tell(plan, GenerationEvent::Started(Instant::now()));
    tell(plan, GenerationEvent::Composed(Duration::from_millis(1)));
    for (choice, asked) in plan.choices.iter().enumerate() {
        if !asked.cancel.is_cancelled() {
            token(plan, choice, EOS);
        }
        tell(plan, GenerationEvent::ChoiceDone { choice, end: ChoiceEnd::Eos });
    }
    tell(plan, GenerationEvent::Done);
}
