//! The invariants of DESIGN section 3 that concern the numbers: 1, 2, 3, 5 to 8, and of 4 the
//! independence of an entry from how it is made. Segmentations are random.

use std::sync::Arc;

use hypic_kernels::{Backend, Cpu, part_from_host, part_to_host};
use hypic_model::{Capture, Item, Logits, Pass, Sequence, Workspace};
use hypic_state::codec::{decode, encode};
use hypic_state::{ComposeRule, DType, Entry, LayerPart};
use hypic_tests::checkpoints::Reference;
use hypic_tests::drive::{Collected, Composed, Rig, Segment};
use hypic_tests::golden::assert_close;
use hypic_tests::{Random, for_each_checkpoint};

const RULES: [ComposeRule; 3] = [ComposeRule::Transition, ComposeRule::Last, ComposeRule::Add];

/// Random segments: lengths around 0, the seam and the chunk of 64, some twice.
fn segments(random: &mut Random, seam: usize, vocab: usize, count: usize) -> Vec<Vec<u32>> {
    let lengths = [0, 1, 2, 3, seam.saturating_sub(1), seam, seam + 1, seam + 2, 20, 63, 64, 65, 64 + seam, 129];
    let mut segments: Vec<Vec<u32>> = Vec::new();
    while segments.len() < count {
        let twice = !segments.is_empty() && random.below(4) == 0;
        let next = match twice {
            true => segments[random.below(segments.len())].clone(),
            false => {
                let n = random.pick(&lengths);
                random.tokens(n, vocab)
            }
        };
        segments.push(next);
    }
    segments
}

fn close<B: Backend>(what: &str, got: &Composed<B>, want: &Composed<B>, query: usize, tolerance: f64) {
    let tail = want.logits[want.logits.len() - query..].concat();
    assert_close(what, &got.logits.concat(), &tail, tolerance);
}

/// One segment and a query are an ordinary forward of both (other rules than `transition`: at seam 0).
fn one_segment<B: Backend>(rig: &Rig<B>, random: &mut Random, tolerance: f64) {
    let vocab = rig.model.spec().vocab;
    for n in [1, 2, 9, 64, 65, 130] {
        let (tokens, query) = (random.tokens(n, vocab), random.tokens(5, vocab));
        let full = rig.forward(&[tokens.clone(), query.clone()].concat());
        for seam in [0, 1, 3, 8, n - 1, n] {
            for rule in RULES.into_iter().filter(|&r| r == ComposeRule::Transition || seam == 0) {
                let segments = rig.segments(std::slice::from_ref(&tokens), seam, &[]);
                let composed = rig.compose(&segments, seam, rule, &query);
                close(&format!("one segment of {n}, seam {seam}, {rule}"), &composed, &full, 5, tolerance);
            }
        }
    }
}

/// A seam at least as wide as every segment makes an ordinary forward, under every rule and anchor.
fn wide_seam<B: Backend>(rig: &Rig<B>, random: &mut Random, tolerance: f64) {
    let vocab = rig.model.spec().vocab;
    let tokens = segments(random, 8, vocab, 8);
    let query = random.tokens(4, vocab);
    let full = rig.forward(&[tokens.concat(), query.clone()].concat());
    for rule in RULES {
        let segments = rig.segments(&tokens, 200, &[1, 2, 3]);
        assert!(segments.iter().all(|s| s.entry.is_none()));
        close(&format!("wide seam, {rule}"), &rig.compose(&segments, 200, rule, &query), &full, 4, tolerance);
    }
}

/// Layer 0's composed state is the full one once the seam covers the convolution, if there is one.
fn first_layer<B: Backend>(rig: &Rig<B>, random: &mut Random, anchor: &[u32], relative: f64) {
    let vocab = rig.model.spec().vocab;
    let convolves = rig.empty().recurrent(0).expect("layer 0 is recurrent").1.is_some();
    for seam in [if convolves { 3 } else { 0 }, 4, 8] {
        let tokens = segments(random, seam, vocab, 8);
        let query = random.tokens(3, vocab);
        let full = rig.forward(&[tokens.concat(), query.clone()].concat());
        let composed = rig.compose(&rig.segments(&tokens, seam, anchor), seam, ComposeRule::Transition, &query);
        let state = |c: &Composed<B>| rig.numbers(c.state.recurrent(0).expect("layer 0 is recurrent").0);
        let (got, want) = (state(&composed), state(&full));
        let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let off: Vec<f64> = got.iter().zip(&want).map(|(a, b)| a - b).collect();
        let share = norm(&off) / norm(&want);
        assert!(
            share <= relative,
            "layer 0 after {:?}, seam {seam}: off by {share:e}",
            tokens.iter().map(Vec::len).collect::<Vec<_>>()
        );
    }
}

/// With bodies captured behind the true prefix everything is exact at any seam.
fn true_prefix<B: Backend>(rig: &Rig<B>, random: &mut Random, tolerance: f64) {
    let vocab = rig.model.spec().vocab;
    for seam in [0, 1, 8] {
        let tokens = segments(random, seam, vocab, 6);
        let query = random.tokens(6, vocab);
        let full = rig.forward(&[tokens.concat(), query.clone()].concat());
        let mut prefix: Vec<u32> = Vec::new();
        let mut segments = Vec::new();
        for segment in &tokens {
            let entry = (segment.len() > seam).then(|| captured_behind(rig, &prefix, segment, seam));
            segments.push(Segment { tokens: segment.clone(), entry, captured_at: prefix.len() as i64 });
            prefix.extend(segment);
        }
        let composed = rig.compose(&segments, seam, ComposeRule::Transition, &query);
        close(&format!("bodies from the true prefix, seam {seam}"), &composed, &full, 6, tolerance);
    }
}

fn captured_behind<B: Backend>(rig: &Rig<B>, prefix: &[u32], segment: &[u32], seam: usize) -> Arc<Entry<B>> {
    let sink = Arc::new(Collected::default());
    let capture = Capture::new(&rig.backend, &rig.model, prefix.len() + seam, true, sink.clone());
    let items = vec![Item::Run([prefix, segment].concat())];
    let sequence = Sequence { state: rig.empty(), items, capture: Some(capture), logits: Logits::None };
    let mut ws = Workspace::new(&rig.backend);
    Pass::new(vec![sequence]).run(&rig.backend, &rig.model, &mut ws).expect("no parts are needed");
    sink.entry(&rig.model, segment, seam)
}

/// The bytes of an entry, in portable form.
fn bytes<B: Backend>(rig: &Rig<B>, entry: &Entry<B>) -> Vec<u8> {
    entry.parts().iter().flat_map(|part| encode(&part_to_host(&rig.backend, part)).to_vec()).collect()
}

/// The entry as another process receives it.
fn sent<B: Backend>(rig: &Rig<B>, entry: &Entry<B>) -> Arc<Entry<B>> {
    let part = |part: &Arc<LayerPart<B>>| {
        let host = decode(encode(&part_to_host(&rig.backend, part))).expect("an intact part");
        Arc::new(part_from_host(&rig.backend, &host))
    };
    let parts = entry.parts().iter().map(part).collect();
    Arc::new(Entry::new(entry.tokens().clone(), entry.seam(), rig.model.layout(), parts).expect("a complete entry"))
}

/// An entry is bit-identical whatever the size of the pieces and the company it is made in, use does not change it, and
/// sending it changes nothing either; swapping segments changes the answer.
fn identical_entries<B: Backend>(rig: &mut Rig<B>, other: &Rig<B>, random: &mut Random) {
    let vocab = rig.model.spec().vocab;
    for n in [9, 64, 72, 73, 200, 333] {
        for anchor in [vec![], random.tokens(5, vocab)] {
            let tokens = random.tokens(n, vocab);
            rig.chunk = 512;
            let entry = rig.entry(&tokens, 8, &anchor).expect("a body");
            let first = bytes(rig, &entry);
            for chunk in [64, 128, 200] {
                rig.chunk = chunk;
                let again = rig.entry(&tokens, 8, &anchor).expect("a body");
                assert!(bytes(rig, &again) == first, "an entry of {n} tokens depends on the chunk {chunk}");
            }
            let elsewhere = other.entry(&tokens, 8, &anchor).expect("a body");
            assert!(bytes(other, &elsewhere) == first, "an entry of {n} tokens depends on the threads");
            rig.chunk = 512;
            assert!(bytes(rig, &batched(rig, &tokens, &anchor, random)) == first, "an entry depends on its batch");

            let mut segments = rig.segments(&[random.tokens(30, vocab), random.tokens(40, vocab)], 8, &anchor);
            segments.push(Segment { tokens: tokens.clone(), entry: Some(entry.clone()), captured_at: 0 });
            let query = random.tokens(5, vocab);
            let before = rig.compose(&segments, 8, ComposeRule::Transition, &query);
            assert!(bytes(rig, &entry) == first, "use has changed an entry of {n} tokens");
            segments[2].entry = Some(sent(rig, &entry));
            let again = rig.compose(&segments, 8, ComposeRule::Transition, &query);
            assert!(again.logits == before.logits, "an entry of {n} tokens that was sent gives another answer");
            segments.swap(1, 2);
            let swapped = rig.compose(&segments, 8, ComposeRule::Transition, &query);
            let differ = before.logits.concat().iter().zip(swapped.logits.concat()).any(|(a, b)| (a - b).abs() > 1e-2);
            assert!(differ, "swapping two segments must change the logits");
        }
    }
}

fn batched<B: Backend>(rig: &Rig<B>, tokens: &[u32], anchor: &[u32], random: &mut Random) -> Arc<Entry<B>> {
    let vocab = rig.model.spec().vocab;
    let sinks: Vec<Arc<Collected<B>>> = (0..3).map(|_| Arc::new(Collected::default())).collect();
    let company = [random.tokens(17, vocab), random.tokens(100, vocab)];
    let sequences = [&company[0][..], tokens, &company[1][..]].into_iter().zip(&sinks).map(|(tokens, sink)| {
        hypic_model::Prefill::new(&rig.backend, &rig.model, tokens, 8, anchor, 512, sink.clone()).take()
    });
    let mut ws = Workspace::new(&rig.backend);
    Pass::new(sequences.collect()).run(&rig.backend, &rig.model, &mut ws).expect("no parts are needed");
    sinks[1].entry(&rig.model, tokens, 8)
}

/// A saved state goes on like the original, bit for bit, and like a sequence that was never saved.
fn saved_states<B: Backend>(rig: &Rig<B>, random: &mut Random, tolerance: f64) {
    let vocab = rig.model.spec().vocab;
    let tokens = segments(random, 8, vocab, 5);
    let query = random.tokens(9, vocab);
    let segments = rig.segments(&tokens, 8, &[4, 5]);
    let whole = rig.compose(&segments, 8, ComposeRule::Transition, &query);
    let items = rig.items(&segments, 8, ComposeRule::Transition, &query);
    for at in 0..=items.len() {
        let (mut before, after) = (items_of(&items[..at]), items_of(&items[at..]));
        before.push(Item::Save);
        before.extend(items_of(&after)); // the state goes on, the saved one must not notice
        let (original, mut saved) = rig.run_saving(rig.empty(), before, Logits::All);
        let saved = saved.pop().expect("one save");
        for _ in 0..2 {
            let state = hypic_model::RunningState::resume(&rig.backend, &rig.model, &saved);
            if after.is_empty() {
                assert_eq!(state.position(), whole.state.position());
                continue;
            }
            let resumed = rig.run(state, items_of(&after), Logits::All);
            let last = resumed.logits.last().expect("rows behind the save");
            assert!(original.logits.last() == Some(last), "resumed at item {at}: not bit for bit");
            assert_close(&format!("resumed at item {at}"), last, whole.logits.last().expect("rows"), tolerance);
        }
    }
}

fn items_of<B: Backend>(items: &[Item<B>]) -> Vec<Item<B>> {
    let copy = |item: &Item<B>| match item {
        Item::Run(ids) => Item::Run(ids.clone()),
        Item::Jump(jump) => Item::Jump(jump.clone()),
        Item::Save => Item::Save,
    };
    items.iter().map(copy).collect()
}

/// 1, 2, 3 and 8, and that saved states go on.
fn check_numbers<B: Backend>(rig: &Rig<B>, random: &mut Random, rounds: usize, tolerance: f64, state: f64) {
    one_segment(rig, random, tolerance);
    for _ in 0..rounds {
        wide_seam(rig, random, tolerance);
        first_layer(rig, random, &[], state);
        first_layer(rig, random, &[9, 8, 7, 6], state);
        true_prefix(rig, random, tolerance);
        saved_states(rig, random, tolerance);
    }
}

/// On the CPU in `dtype`.
fn cpu(folder: &str, threads: usize, dtype: DType) -> Rig<Cpu> {
    Rig::load(Cpu::new(threads), folder, dtype)
}

fn check_cpu_numbers(folder: &str, random: &mut Random) {
    check_numbers(&cpu(folder, 2, DType::F32), random, 3, 5e-4, 2e-6);
}

/// Bit by bit, whatever routers choose.
fn check_cpu_entries(folder: &str, random: &mut Random) {
    for dtype in [DType::F32, DType::Bf16] {
        identical_entries(&mut cpu(folder, 1, dtype), &cpu(folder, 2, dtype), random);
    }
}

fn check(reference: &Reference) {
    let (folder, mut random) = (reference.folder(), Random(100));
    let rig = Rig::load(hypic_kernels::Reference::<f64>::new(), &folder, DType::F64);
    // Operators below DECAYED are omitted, in float64 too: that is what remains.
    check_numbers(&rig, &mut random, 1, 1e-7, 1e-8);
    if !reference.experts {
        check_cpu_numbers(&folder, &mut random);
    }
    check_cpu_entries(&folder, &mut random);
}

for_each_checkpoint!(check);

#[test]
fn demo_model() {
    let mut random = Random(200);
    check_cpu_numbers("models/demo", &mut random);
    check_cpu_entries("models/demo", &mut random);
}
