//! What an answer says of its cost: each token of the prompt once, composed never called exact, prefix states before
//! entries.

use hypic_router::{Anchor, Mode, Report, Request, SegmentSource, Usage};
use hypic_tests::Random;
use hypic_tests::ask::{Complete, ask, conversation, documents, examples_of, in_mode, tokens};
use hypic_tests::cluster::{Cluster, Setup};

const VOCAB: usize = 1746;

async fn answer(cluster: &Cluster, request: &Request) -> Complete {
    ask(&cluster.router, request.clone()).await.expect("an answer")
}

async fn report(cluster: &Cluster, request: &Request) -> Report {
    answer(cluster, request).await.report
}

/// exact, composed, seam, computed
fn kinds(usage: &Usage) -> [u64; 4] {
    [usage.exact_tokens, usage.composed_tokens, usage.seam_tokens, usage.computed_tokens]
}

fn sum(lengths: impl Iterator<Item = usize>) -> u64 {
    lengths.sum::<usize>() as u64
}

#[tokio::test(flavor = "multi_thread")]
async fn cold_warm_and_repeated_at_every_length() {
    for seam in [0usize, 1, 3, 8] {
        let mut random = Random(seam as u64);
        let cluster = Cluster::start(Setup::default());
        let lengths = [1, 2, 3, seam.saturating_sub(1), seam, seam + 1, seam + 2, 70];
        let segments: Vec<Vec<u32>> = lengths.iter().filter(|&&n| n > 0).map(|&n| random.tokens(n, VOCAB)).collect();
        let twice = [segments.clone(), segments.clone()].concat();
        let with_body = |s: &&Vec<u32>| s.len() > seam;
        let bodies = sum(segments.iter().filter(with_body).map(|s| s.len() - seam));
        let seams = sum(twice.iter().map(|s| s.len().min(seam)));
        let mut request = tokens(twice.clone(), vec![1, 2, 3, 4], Vec::new());
        request.options.seam = Some(seam as u32);
        request.max_tokens = Some(1);

        let cold = report(&cluster, &request).await;
        assert_eq!(kinds(&cold.usage), [0, bodies, seams, bodies + 4], "every body is made once: {cold:?}");
        for (i, (told, segment)) in cold.segments.iter().zip(&twice).enumerate() {
            let (source, reused) = match segment.len() <= seam {
                true => (SegmentSource::SeamOnly, 0),
                false if i < segments.len() => (SegmentSource::Computed, 0),
                false => (SegmentSource::Memory, (segment.len() - seam) as u64),
            };
            assert_eq!((told.source, told.reused, told.tokens), (source, reused, segment.len() as u64), "segment {i}");
        }

        // Repeated: all but the last token from the prefix state. Ordinary up to the first body.
        let first_body = twice.iter().position(|s| s.len() > seam).expect("one has a body");
        let exact = sum(twice[..first_body].iter().map(Vec::len)) + seam as u64;
        let total = cold.usage.prompt_tokens;
        let repeated = report(&cluster, &request).await;
        assert_eq!(kinds(&repeated.usage), [exact, total - 1 - exact, 0, 1], "{repeated:?}");
        assert!(repeated.segments.iter().all(|s| s.source == SegmentSource::Prefix && s.reused == s.tokens));

        // Another query: the state before the query.
        let mut other = tokens(twice.clone(), vec![9, 8], Vec::new());
        other.options.seam = Some(seam as u32);
        let other = report(&cluster, &other).await;
        assert_eq!(kinds(&other.usage), [exact, total - 4 - exact, 0, 2], "{other:?}");

        // Another order: entries.
        let mut reversed = tokens(segments.iter().rev().cloned().collect(), vec![5], Vec::new());
        reversed.options.seam = Some(seam as u32);
        let reversed = report(&cluster, &reversed).await;
        let seams = sum(segments.iter().map(|s| s.len().min(seam)));
        assert_eq!(kinds(&reversed.usage), [0, bodies, seams, 1], "{reversed:?}");
        let composed = reversed.segments.iter().filter(|s| s.source == SegmentSource::Memory).count();
        assert_eq!(composed, segments.iter().filter(with_body).count());
        cluster.settle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_segments_are_no_segments() {
    let cluster = Cluster::start(Setup::default());
    let segment = Random(1).tokens(30, VOCAB);
    let with = tokens(vec![vec![], segment.clone(), vec![], vec![]], vec![3], Vec::new());
    let without = tokens(vec![segment], vec![3], Vec::new());
    let first = answer(&cluster, &with).await;
    assert_eq!(first.report.usage.prompt_tokens, 31);
    let second = answer(&cluster, &without).await;
    assert_eq!(first.ids(), second.ids());
    assert_eq!(second.report.usage.computed_tokens, 1, "the same prompt: {:?}", second.report);

    let only_query = answer(&cluster, &tokens(vec![vec![]], vec![3], Vec::new())).await;
    assert_eq!(kinds(&only_query.report.usage), [0, 0, 0, 1]);
    let no_query = ask(&cluster.router, tokens(vec![vec![3]], Vec::new(), Vec::new())).await;
    assert!(no_query.expect_err("nothing to take logits from").message.contains("query"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_different_seam_anchor_or_salt_is_another_entry() {
    let cluster = Cluster::start(Setup::default());
    let mut random = Random(2);
    let [first, segment] = [30, 40].map(|n| random.tokens(n, VOCAB));
    let mut request = tokens(vec![first, segment], vec![3], vec![7, 7]);
    report(&cluster, &request).await;
    let mut salted = request.clone();
    salted.options.salt = Some("tenant".to_string());
    let mut narrower = request.clone();
    narrower.options.seam = Some(4);
    for other in [&salted, &narrower] {
        let told = report(&cluster, other).await;
        assert_eq!(told.usage.exact_tokens + told.usage.composed_tokens, 0, "{told:?}");
    }
    // The first segment never has an anchor, so its entry serves under any.
    if let hypic_router::Prompt::Tokens { anchor, .. } = &mut request.prompt {
        *anchor = Some(vec![8]);
    }
    let told = report(&cluster, &request).await;
    let sources: Vec<SegmentSource> = told.segments.iter().map(|s| s.source).collect();
    assert_eq!(sources, [SegmentSource::Memory, SegmentSource::Computed]);
}

/// The anchors by name make different entries of documents, and none of the system text.
#[tokio::test(flavor = "multi_thread")]
async fn anchors_by_name() {
    let example = examples_of("short").remove(0);
    let cluster = Cluster::start(Setup::default());
    for anchor in [Anchor::Turn, Anchor::None, Anchor::System] {
        let mut request = example.request();
        request.options.anchor = Some(anchor);
        let cold = answer(&cluster, &request).await;
        assert!(example.is_right(&cold.choices[0].text), "anchor {anchor}: {:?}", cold.choices[0].text);
        let computed = cold.report.segments[1..].iter().filter(|s| s.source == SegmentSource::Computed).count();
        assert_eq!(computed, example.documents.len(), "anchor {anchor}");
        // Its first piece is the same entry under all anchors.
        let first = cold.report.segments[0].source;
        let expected = if anchor == Anchor::Turn { SegmentSource::Computed } else { SegmentSource::Memory };
        assert_eq!(first, expected, "anchor {anchor}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_continued_conversation_resumes_exactly() {
    let example = examples_of("medium").remove(1);
    let content = format!("{}{}", example.documents.concat(), example.question);
    let start = [("system", example.system.as_str()), ("user", content.as_str())];
    let cluster = Cluster::start(Setup::default());
    let first = answer(&cluster, &conversation(&start)).await;
    let first_usage = first.report.usage;
    assert_eq!(kinds(&first_usage), [0, 0, 0, first_usage.prompt_tokens], "nothing is marked");

    let said = first.choices[0].text.clone();
    let next = [start[0], start[1], ("assistant", &said), ("user", &example.question)];
    let second = answer(&cluster, &conversation(&next)).await;
    let usage = second.report.usage;
    assert_eq!(usage.exact_tokens, first_usage.prompt_tokens - 1, "it goes on where the first prompt ended: {usage:?}");
    assert_eq!(usage.composed_tokens + usage.seam_tokens, 0);

    let elsewhere = Cluster::start(Setup { cache_bytes: 0, ..Setup::default() });
    let fresh = answer(&elsewhere, &conversation(&next)).await;
    assert_eq!(fresh.report.usage.exact_tokens, 0);
    assert_eq!(second.ids(), fresh.ids());

    // A conversation that branches off shares the messages before.
    let branch = [start[0], ("user", "Question: Who is it?")];
    let usage = report(&cluster, &conversation(&branch)).await.usage;
    assert!(usage.exact_tokens > 0 && usage.exact_tokens < first_usage.prompt_tokens, "{usage:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prefix_mode_is_a_real_baseline() {
    let example = examples_of("medium").remove(2);
    let cluster = Cluster::start(Setup::default());
    let request = in_mode(example.request(), Mode::Prefix);
    let full = in_mode(example.request(), Mode::Full);

    let reference = answer(&cluster, &full).await;
    let total = reference.report.usage.prompt_tokens;
    assert_eq!(kinds(&reference.report.usage), [0, 0, 0, total]);
    let cold = answer(&cluster, &request).await;
    assert_eq!(kinds(&cold.report.usage), [0, 0, 0, total], "mode full leaves nothing behind");
    assert!(cold.report.segments.iter().all(|s| s.source == SegmentSource::Computed && s.reused == 0));
    let repeated = answer(&cluster, &request).await;
    assert_eq!(kinds(&repeated.report.usage), [total - 1, 0, 0, 1]);
    assert_eq!(reference.ids(), cold.ids());
    assert_eq!(reference.ids(), repeated.ids());

    let segments: u64 = cold.report.segments.iter().map(|s| s.tokens).sum();
    let other = in_mode(documents(&example.system, &example.documents, "Question: Who?"), Mode::Prefix);
    let usage = report(&cluster, &other).await.usage;
    assert_eq!(usage.exact_tokens, segments, "another question starts behind the documents");

    let mut swapped = example.documents.clone();
    swapped.reverse();
    let told = report(&cluster, &in_mode(documents(&example.system, &swapped, &example.question), Mode::Prefix)).await;
    assert_eq!(told.usage.exact_tokens, told.segments[0].tokens, "only the system text is at its place");
    assert_eq!(told.segments[0].source, SegmentSource::Prefix);

    let again = answer(&cluster, &full).await;
    assert_eq!(kinds(&again.report.usage), [0, 0, 0, total], "mode full never reuses");
    let hypic = answer(&cluster, &example.request()).await;
    assert_eq!(hypic.report.usage.exact_tokens, 0, "modes do not share prefix states");
    assert!(example.is_right(&hypic.choices[0].text), "{:?}", hypic.choices[0].text);
}

/// In mode hypic a prefix state comes first, entries after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_state_and_entries_in_one_prompt() {
    let mut random = Random(8);
    let [a, b, c, d] = [30, 40, 50, 60].map(|n| random.tokens(n, VOCAB));
    let cluster = Cluster::start(Setup::default());
    report(&cluster, &tokens(vec![a.clone(), b.clone(), c.clone()], vec![1, 2], vec![])).await;
    let told = report(&cluster, &tokens(vec![a, b, d, c], vec![3, 4], vec![])).await;
    let sources: Vec<SegmentSource> = told.segments.iter().map(|s| s.source).collect();
    use SegmentSource::{Computed, Memory, Prefix};
    assert_eq!(sources, [Prefix, Prefix, Computed, Memory]);
    assert_eq!(kinds(&told.usage), [8, 62 + 42, 16, 52 + 2], "{told:?}");
}
