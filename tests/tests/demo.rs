//! The demo model's scores, and what a user of it sees: documents in another order behind another system text are
//! mostly reused, and the report says so segment by segment.

use std::sync::Arc;

use futures::future::join_all;
use hypic::ComputeDType;
use hypic::assembly::{Local, LocalConfig};
use hypic::source::ModelSource;
use hypic_router::{Mode, Router, SegmentSource};
use hypic_tests::ask::{Complete, Example, ask, examples, examples_of, in_mode};

const SEAM: u64 = 8;

fn demo() -> Local {
    let config = LocalConfig { dtype: ComputeDType::F32, cache_bytes: 256 << 20, ..LocalConfig::named("demo") };
    let checkpoint = ModelSource::Demo.checkpoint().expect("the demo model is in the program");
    let text = ModelSource::Demo.text().expect("so is its tokenizer");
    Local::start(config, &checkpoint, text, &|_| {}).expect("it starts")
}

/// Names of the examples that are answered wrong, all being asked at once.
async fn wrong(router: &Arc<Router>, mode: Mode) -> Vec<String> {
    let asked = examples().into_iter().map(|example| async move {
        let answer = ask(router.as_ref(), in_mode(example.request(), mode)).await.expect("an answer");
        let text = &answer.choices[0].text;
        (!example.is_right(text)).then(|| format!("{}: {text:?} is none of {:?}", example.id, example.answers))
    });
    join_all(asked).await.into_iter().flatten().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn full_mode_gets_148_of_150() {
    let local = demo();
    let wrong = wrong(local.router(), Mode::Full).await;
    assert!(wrong.len() <= 2, "{} wrong answers: {wrong:#?}", wrong.len());
}

/// At the defaults: a seam of 8, the anchor `turn`, the rule `transition`.
#[tokio::test(flavor = "multi_thread")]
async fn hypic_mode_gets_140_of_150() {
    let local = demo();
    let wrong = wrong(local.router(), Mode::Hypic).await;
    assert!(wrong.len() <= 10, "{} wrong answers: {wrong:#?}", wrong.len());
}

fn assert_right(example: &Example, answer: &Complete) {
    let text = &answer.choices[0].text;
    assert!(example.is_right(text), "{}: {text:?} is none of {:?}", example.id, example.answers);
}

#[tokio::test(flavor = "multi_thread")]
async fn documents_in_another_order_are_reused() {
    let local = demo();
    for first in examples_of("medium").into_iter().take(3) {
        let cold = ask(local.router().as_ref(), first.request()).await.expect("an answer");
        assert_right(&first, &cold);
        assert_eq!(cold.report.segments.len(), 1 + first.documents.len(), "the system text and the documents");
        for segment in &cold.report.segments {
            assert_eq!((segment.source, segment.reused), (SegmentSource::Computed, 0));
            assert!(segment.worker.is_some(), "a worker computed it");
        }
        assert_eq!(cold.report.usage.composed_tokens + cold.report.usage.exact_tokens, 0);

        let mut second = first.clone();
        second.system = format!("{} Be brief.", first.system);
        second.documents.reverse();
        let warm = ask(local.router().as_ref(), second.request()).await.expect("an answer");
        assert_right(&second, &warm);
        let (system, documents) = warm.report.segments.split_first().expect("segments");
        assert_eq!((system.source, system.reused), (SegmentSource::Computed, 0));
        for (document, before) in documents.iter().zip(cold.report.segments[1..].iter().rev()) {
            assert_eq!(document.tokens, before.tokens, "a segment's ids do not depend on its neighbours");
            assert_eq!((document.source, document.reused), (SegmentSource::Memory, document.tokens - SEAM));
            assert_eq!(document.worker.as_deref(), Some("combiner-0"), "who held it");
        }
        let usage = warm.report.usage;
        assert_eq!(usage.exact_tokens, 0, "a composed hit is never exact");
        assert_eq!(usage.composed_tokens, documents.iter().map(|d| d.reused).sum::<u64>());
        assert!(usage.composed_tokens * 4 > usage.prompt_tokens * 3, "most of the prompt is reused: {usage:?}");
    }
}
