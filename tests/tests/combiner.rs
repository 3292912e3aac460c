//! The combiner alone: prompts that wait for parts, answers that decode, deadlines and cancellations, and who waits
//! for whom.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hypic_cache::{Fingerprint, KeySpace, PrefixChain, Source, Store, StoreConfig};
use hypic_combiner::{Combiner, CombinerConfig, CombinerLoad};
use hypic_kernels::Cpu;
use hypic_model::Model;
use hypic_scatter_worker::{Interest, Worker, WorkerConfig};
use hypic_state::{ComposeRule, DType};
use hypic_tests::Random;
use hypic_tests::cluster::{TestStore, demo_model, key_space};
use hypic_tests::drive::Rig;
use hypic_tests::golden::Golden;
use hypic_transport::{
    ChoiceEnd, Combine, CombineError, Delivery, Exchange, GenerationEvent, Plan, PlanChoice, PlanSegment, PrefillJob,
    PrefixHit, SamplingParams, Scatter, SegmentBody, TransferId,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_util::sync::CancellationToken;

const VOCAB: usize = 1746;
const SEAM: usize = 8;
const SOON: Duration = Duration::from_secs(20);

/// A combiner and a worker that gives it entries.
struct Bench {
    combiner: Combiner<Cpu>,
    worker: Arc<Worker<Cpu, hypic_combiner::PrefixState<Cpu>>>,
    exchange: Exchange<Cpu>,
    store: TestStore,
    model: Model<Cpu>,
}

impl Bench {
    fn new() -> Self {
        Self::with(CombinerConfig::named("combiner"))
    }

    fn with(config: CombinerConfig) -> Self {
        Self::of(config, demo_model(&Cpu::new(1)))
    }

    fn of(config: CombinerConfig, model: Model<Cpu>) -> Self {
        let cpu = Cpu::new(1);
        let settings = StoreConfig::default();
        let store: TestStore = Store::new(settings);
        let exchange = Exchange::default();
        let worker = Worker::start(
            WorkerConfig::named("worker"),
            Cpu::new(1),
            model.clone(),
            store.clone(),
            Arc::new(exchange.clone()),
            Interest::default(),
        );
        let worker = Arc::new(worker.expect("a thread"));
        let (kept, arrivals) = (store.clone(), exchange.clone());
        let combiner = Combiner::start(config, cpu, model.clone(), kept, settings, arrivals, worker.clone());
        Bench { combiner: combiner.expect("a thread"), worker, exchange, store, model }
    }

    fn key(&self, tokens: &[u32]) -> hypic_cache::EntryKey {
        hypic_cache::EntryKey::new(&key_space(&self.model), SEAM, &[], b"", tokens)
    }

    /// Have the entry of `tokens` sent.
    async fn send(&self, transfer: TransferId, tokens: &[u32]) {
        let job = PrefillJob {
            key: self.key(tokens),
            tokens: tokens.into(),
            seam: SEAM,
            anchor: Arc::new([]),
            salt: Arc::new([]),
            to: Delivery { combiner: "combiner".into(), transfer },
            held_only: false,
            request: "test".into(),
            deadline: None,
            cancel: CancellationToken::new(),
        };
        self.worker.prefill(job).await.expect("an entry");
    }

    /// Waits until so many answers are under way.
    async fn sequences(&self, wanted: usize) {
        let begun = Instant::now();
        while Combiner::load(&self.combiner).sequences != wanted {
            assert!(begun.elapsed() < SOON, "{wanted} answers under way? {:?}", Combiner::load(&self.combiner));
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until nothing is under way.
    async fn settle(&self) {
        self.sequences(0).await;
        let begun = Instant::now();
        while self.store.stats().pinned != 0 {
            assert!(begun.elapsed() < SOON, "still in use: {:?}", self.store.stats());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        assert_eq!(Combiner::load(&self.combiner), CombinerLoad::default());
    }
}

/// A plan under way, as its requester sees it.
struct Asked {
    events: UnboundedReceiver<GenerationEvent>,
    cancel: CancellationToken,
    choices: Vec<CancellationToken>,
}

impl Asked {
    async fn next(&mut self) -> GenerationEvent {
        let event = tokio::time::timeout(SOON, self.events.recv()).await.expect("an event soon");
        event.expect("the last event is an end")
    }

    /// The tokens of all answers until all are done.
    async fn tokens(&mut self) -> Result<Vec<Vec<u32>>, CombineError> {
        let mut tokens = vec![Vec::new(); self.choices.len()];
        loop {
            match self.next().await {
                GenerationEvent::Token(t) => tokens[t.choice].push(t.token),
                GenerationEvent::Done => return Ok(tokens),
                GenerationEvent::Failed(why) => return Err(why),
                _ => {}
            }
        }
    }

    /// Waits for the first token.
    async fn begins(&mut self) {
        while !matches!(self.next().await, GenerationEvent::Token(_)) {}
    }

    /// Tokens that have come by now.
    fn count(&mut self) -> usize {
        let events = std::iter::from_fn(|| self.events.try_recv().ok());
        events.filter(|e| matches!(e, GenerationEvent::Token(_))).count()
    }
}

/// What to ask.
struct Ask {
    segments: Vec<PlanSegment>,
    query: Vec<u32>,
    max_tokens: usize,
    answers: usize,
    deadline: Option<Duration>,
    resume: Option<PrefixHit>,
    /// Tokens that the first answer has already.
    told: Vec<u32>,
    sampling: SamplingParams,
}

impl Ask {
    fn rows(query: Vec<u32>, max_tokens: usize) -> Self {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let (segments, told) = (Vec::new(), Vec::new());
        Ask { segments, query, max_tokens, answers: 1, deadline: None, resume: None, told, sampling }
    }

    fn composed(bench: &Bench, tokens: &[u32], transfer: TransferId, query: Vec<u32>) -> Self {
        let body = SegmentBody::Entry { seam: SEAM, key: bench.key(tokens), transfer, held: false };
        Ask { segments: vec![PlanSegment { tokens: tokens.into(), body }], ..Ask::rows(query, 6) }
    }

    fn of(self, combiner: &Combiner<Cpu>) -> Asked {
        let (sender, events) = unbounded_channel();
        let cancel = CancellationToken::new();
        let choices: Vec<CancellationToken> = (0..self.answers).map(|_| cancel.child_token()).collect();
        let space = KeySpace::new(Fingerprint([0; 32]), DType::F32);
        let choice = |(i, cancel): (usize, &CancellationToken)| PlanChoice {
            sampling: SamplingParams { choice: i as u32, ..self.sampling.clone() },
            told: if i == 0 { self.told.clone() } else { Vec::new() },
            cancel: cancel.clone(),
        };
        let plan_choices = choices.iter().enumerate().map(choice).collect();
        combiner.generate(Plan {
            request: "test".into(),
            arrived: Instant::now(),
            resume: self.resume,
            segments: self.segments,
            query: self.query,
            rule: ComposeRule::Transition,
            root: PrefixChain::new(&space, 2, ComposeRule::Transition, SEAM, &[], b"").key(),
            saves: Vec::new(),
            choices: plan_choices,
            prompt_ids: Vec::new(),
            eos: Arc::new([]),
            max_tokens: self.max_tokens,
            deadline: self.deadline.map(|d| Instant::now() + d),
            cancel: cancel.clone(),
            events: sender,
        });
        Asked { events, cancel, choices }
    }
}

const ENDLESS: usize = 1_000_000;

/// The answer that passes driven by hand give.
fn by_hand(segment: &[u32], query: &[u32], steps: usize) -> Vec<u32> {
    let backend = Cpu::new(1);
    let rig = Rig { model: demo_model(&backend), backend, chunk: 512 };
    let composed = rig.compose(&rig.segments(&[segment.to_vec()], SEAM, &[]), SEAM, ComposeRule::Transition, query);
    rig.greedy(composed, steps).0
}

#[tokio::test(flavor = "multi_thread")]
async fn a_composition_that_waits_holds_up_nobody() {
    let bench = Bench::new();
    let mut random = Random(1);
    let (segment, query) = (random.tokens(60, VOCAB), random.tokens(4, VOCAB));
    let transfer = TransferId::random();
    let mut waiting = Ask::composed(&bench, &segment, transfer, query.clone()).of(&bench.combiner);

    let decoded = Ask::rows(random.tokens(30, VOCAB), 40).of(&bench.combiner).tokens().await;
    assert_eq!(decoded.expect("it waits for nothing")[0].len(), 40);
    let other = TransferId::random();
    let next = random.tokens(50, VOCAB);
    let mut composed = Ask::composed(&bench, &next, other, vec![1]).of(&bench.combiner);
    bench.send(other, &next).await;
    composed.tokens().await.expect("nor does another composition");
    assert_eq!(waiting.count(), 0);
    bench.sequences(1).await;

    bench.send(transfer, &segment).await;
    let got = waiting.tokens().await.expect("its entry has come");
    assert_eq!(got, [by_hand(&segment, &query, 6)]);
    bench.settle().await;
}

/// Parts that come one by one, while another prompt goes through its layers in between.
#[tokio::test(flavor = "multi_thread")]
async fn prompts_take_turns_between_two_layers() {
    let bench = Bench::new();
    let mut random = Random(2);
    let (segment, query) = (random.tokens(60, VOCAB), random.tokens(4, VOCAB));
    let scratch = TransferId::random();
    let whole = bench.exchange.open(scratch.id);
    bench.send(scratch, &segment).await;

    let store: TestStore = Store::new(StoreConfig::default());
    let hypic_cache::Claim::Lead(lead) = store.claim(bench.key(&segment), &segment.as_slice().into(), SEAM) else {
        unreachable!("the store is empty")
    };
    let transfer = TransferId::random();
    let mut composed = Ask::composed(&bench, &segment, transfer, query.clone()).of(&bench.combiner);
    bench.exchange.send(transfer, Source::Flight(lead.flight().clone())).expect("the plan has opened it");
    for layer in 0..bench.model.layout().len() {
        use hypic_state::{PartSource, PartState};
        let PartState::Ready(part) = whole.part(layer) else { unreachable!("it is whole") };
        lead.publish(layer, part);
        Ask::rows(random.tokens(20, VOCAB), 2).of(&bench.combiner).tokens().await.expect("an answer");
    }
    assert_eq!(composed.tokens().await.expect("all parts came"), [by_hand(&segment, &query, 6)]);
    drop((whole, lead));
    bench.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn decoding_goes_on_during_a_long_prompt_and_the_prompt_during_decoding() {
    let bench = Bench::new();
    let mut random = Random(3);
    let mut decoding: Vec<Asked> =
        (0..4).map(|_| Ask::rows(random.tokens(20, VOCAB), ENDLESS).of(&bench.combiner)).collect();
    for asked in &mut decoding {
        asked.begins().await;
    }
    let mut long = Ask::rows(random.tokens(6000, VOCAB), 1).of(&bench.combiner);
    while !matches!(long.next().await, GenerationEvent::Started(_)) {}
    decoding.iter_mut().for_each(|asked| _ = asked.count());
    long.begins().await;
    for asked in &mut decoding {
        let meanwhile = asked.count();
        assert!(meanwhile >= 3, "{meanwhile} tokens while a long prompt was prefilled");
    }
    drop(decoding);
    bench.settle().await;
}

/// An entry that should be held and is not is asked for at once; one that is needs nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_held_no_longer_is_asked_for() {
    let bench = Bench::new();
    let mut random = Random(4);
    let (segment, query) = (random.tokens(60, VOCAB), random.tokens(4, VOCAB));
    let want = by_hand(&segment, &query, 6);
    for (round, held_in_fact) in [false, true].into_iter().enumerate() {
        let transfer = TransferId::random();
        let mut ask = Ask::composed(&bench, &segment, transfer, query.clone());
        let SegmentBody::Entry { held, .. } = &mut ask.segments[0].body else { unreachable!("it has a body") };
        *held = true;
        let mut asked = ask.of(&bench.combiner);
        if !held_in_fact {
            assert!(matches!(asked.next().await, GenerationEvent::Missing(0)), "round {round}");
            bench.send(transfer, &segment).await;
        }
        assert_eq!(asked.tokens().await.expect("an answer").concat(), want, "round {round}");
    }
    bench.settle().await;
}

/// An answer that another combiner began goes on as it would have, greedy and sampled, and tells nothing twice.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_taken_up_where_it_was() {
    let bench = Bench::new();
    let mut random = Random(9);
    let query = random.tokens(20, VOCAB);
    let penalties = SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.3, ..SamplingParams::default() };
    for sampling in [SamplingParams { temperature: 0.0, ..penalties.clone() }, SamplingParams { seed: 7, ..penalties }]
    {
        let ask = |told: Vec<u32>| Ask { told, sampling: sampling.clone(), ..Ask::rows(query.clone(), 40) };
        let whole = ask(Vec::new()).of(&bench.combiner).tokens().await.expect("an answer").remove(0);
        for cut in [1, 17, 39] {
            let rest = ask(whole[..cut].to_vec()).of(&bench.combiner).tokens().await.expect("an answer").remove(0);
            assert_eq!(rest, whole[cut..], "cut at {cut}, {sampling:?}");
        }
    }
    bench.settle().await;
}

/// Beyond the original maximum of dynamic NTK scaling: the reference's answer, however often it changes hands, and no
/// reuse.
#[tokio::test(flavor = "multi_thread")]
async fn prompts_of_other_lengths_share_nothing() {
    let Rig { model, .. } = Rig::load(Cpu::new(1), "golden/granitemoehybrid/config.dynamic.json", DType::F32);
    let bench = Bench::of(CombinerConfig::named("combiner"), model);
    let golden = Golden::open("golden/granitemoehybrid/golden.dynamic.safetensors");
    let (prompt, want) = (golden.get("short.input_ids").ids(), golden.get("greedy.tokens").ids());
    for told in [0, 1, 12, 23] {
        let ask = Ask { told: want[..told].to_vec(), answers: 2, ..Ask::rows(prompt.clone(), want.len()) };
        let answers = ask.of(&bench.combiner).tokens().await.expect("an answer");
        assert_eq!(answers, [&want[told..], &want[..]], "{told} told");
    }
    let ask = Ask::composed(&bench, &prompt, TransferId::random(), vec![1]);
    let why = ask.of(&bench.combiner).tokens().await.expect_err("an entry of another length").to_string();
    assert!(why.contains("38 tokens") && why.contains("dynamic") && why.contains("up to 24"), "{why}");
    bench.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_state_that_is_gone_is_told() {
    let bench = Bench::new();
    let space = KeySpace::new(Fingerprint([0; 32]), DType::F32);
    let key = PrefixChain::new(&space, 2, ComposeRule::Transition, SEAM, &[], b"").rows(&[1, 2]).key();
    let resume = Some(PrefixHit { key, tokens: 2, exact: 2 });
    let why = Ask { resume, ..Ask::rows(vec![3], 3) }.of(&bench.combiner).tokens().await;
    assert_eq!(why, Err(CombineError::StalePrefix));
    bench.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_ends_waiting_for_a_part() {
    let bench = Bench::new();
    let transfer = TransferId::random();
    let wait = Duration::from_millis(80);
    let begun = Instant::now();
    let ask = Ask { deadline: Some(wait), ..Ask::composed(&bench, &[1; 30], transfer, vec![1]) };
    let why = ask.of(&bench.combiner).tokens().await.expect_err("nothing comes");
    assert_eq!(why, CombineError::Deadline);
    assert!(begun.elapsed() >= wait);

    let mut cancelled = Ask::composed(&bench, &[1; 30], transfer, vec![1]).of(&bench.combiner);
    tokio::time::sleep(Duration::from_millis(20)).await;
    cancelled.cancel.cancel();
    assert_eq!(cancelled.tokens().await.expect_err("it was cancelled"), CombineError::Cancelled);

    // A requester that has gone without a word is as good as a cancellation.
    drop(Ask::composed(&bench, &[1; 30], transfer, vec![1]).of(&bench.combiner));
    bench.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_answer_is_cancelled_and_the_others_go_on() {
    let bench = Bench::new();
    let query = Random(5).tokens(20, VOCAB);
    let alone = Ask::rows(query.clone(), 300).of(&bench.combiner).tokens().await.expect("an answer");
    let mut asked = Ask { answers: 3, ..Ask::rows(query, 300) }.of(&bench.combiner);
    asked.begins().await;
    asked.choices[1].cancel();
    let mut tokens = [Vec::new(), Vec::new(), Vec::new()];
    let mut ends = Vec::new();
    loop {
        match asked.next().await {
            GenerationEvent::Token(t) => tokens[t.choice].push(t.token),
            GenerationEvent::ChoiceDone { choice, end } => ends.push((choice, end)),
            GenerationEvent::Done => break,
            _ => {}
        }
    }
    ends.sort_by_key(|(choice, _)| *choice);
    assert_eq!(ends, [(0, ChoiceEnd::Length), (1, ChoiceEnd::Cancelled), (2, ChoiceEnd::Length)]);
    assert!(tokens[1].len() < 299, "it was cancelled early");
    // The first token of the first answer was taken before.
    assert_eq!(tokens[0], alone[0][1..]);
    assert_eq!(tokens[2], alone[0]);
    bench.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn there_are_no_more_answers_than_places() {
    let bench = Bench::with(CombinerConfig { max_sequences: 2, max_waiting: 3, ..CombinerConfig::named("combiner") });
    let mut first = Ask { answers: 2, ..Ask::rows(vec![1, 2], ENDLESS) }.of(&bench.combiner);
    first.begins().await;
    let mut waiting: Vec<Asked> = (0..3).map(|i| Ask::rows(vec![3, i], 3).of(&bench.combiner)).collect();
    let refused = Ask::rows(vec![4], 3).of(&bench.combiner).tokens().await;
    assert_eq!(refused, Err(CombineError::Overloaded { waiting: 3 }));
    waiting[1].cancel.cancel();
    assert_eq!(waiting[1].tokens().await, Err(CombineError::Cancelled), "one that waits can be cancelled");
    assert_eq!(waiting[0].count(), 0, "there is no place");
    first.cancel.cancel();
    for i in [0, 2] {
        assert_eq!(waiting[i].tokens().await.expect("now there is")[0].len(), 3);
    }
    // More answers than there are places are served alone.
    let many = Ask { answers: 5, ..Ask::rows(vec![5], 3) }.of(&bench.combiner).tokens().await;
    assert_eq!(many.expect("served").len(), 5);
    bench.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_tells_everybody() {
    let config = CombinerConfig { max_sequences: 2, ..CombinerConfig::named("combiner") };
    let bench = Bench::with(config);
    let combiner = &bench.combiner;
    let transfer = TransferId::random();
    let mut decoding = Ask::rows(vec![1, 2], ENDLESS).of(combiner);
    decoding.begins().await;
    let mut composing = Ask::composed(&bench, &[1; 30], transfer, vec![1]).of(combiner);
    let mut waiting = Ask::rows(vec![1, 2], 3).of(combiner);
    let combiner = bench.combiner;
    tokio::task::spawn_blocking(move || drop(combiner)).await.expect("it stops");
    for asked in [&mut decoding, &mut composing, &mut waiting] {
        assert_eq!(asked.tokens().await, Err(CombineError::ShuttingDown));
    }
}
