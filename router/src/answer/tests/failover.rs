//! Combiners that are lost, stop, have too much to do or lack a state.

use super::*;

const PATIENCE: Duration = Duration::from_secs(10);

fn gone() -> GenerationEvent {
    GenerationEvent::Failed(CombineError::Gone("combiner-0".to_owned()))
}

#[tokio::test(start_paused = true)]
async fn a_combiner_lost_before_the_first_token_is_replaced() {
    for lost in [Some(gone()), Some(GenerationEvent::Failed(CombineError::ShuttingDown)), None] {
        let bench = Bench::new(&[&[]], 2, FaultConfig::default());
        let mut client = bench.ask(ask(&[ids(1, 30)]));
        let plan = bench.combiners[0].plan().await;
        let (first, cancelled) = (plan.segments[0].body, plan.cancel.clone());
        match lost {
            Some(event) => tell(&plan, event),
            None => drop(plan),
        }
        let plan = bench.combiners[1].plan().await;
        assert!(cancelled.is_cancelled() && !plan.cancel.is_cancelled());
        assert_ne!(plan.segments[0].body, first, "the transfers are new ones");
        assert!(plan.choices[0].told.is_empty());
        tokio::time::sleep(Duration::from_millis(5)).await;
        complete(&plan);
        let told = client.rest().await;
        assert_eq!(told.tokens[0], [EOS]);
        assert_eq!(told.finished, [(0, FinishReason::Stop)]);
        told.end.expect("an answer");
        bench.settled().await;
    }
}

/// The client sees one answer: what it has is not told again, and what has ended has ended.
#[tokio::test(start_paused = true)]
async fn a_combiner_lost_while_decoding_is_replaced() {
    let bench = Bench::new(&[&[]], 3, FaultConfig::default());
    let mut two = ask(&[ids(1, 30)]);
    two.choices.push(SamplingParams { choice: 1, ..two.choices[0].clone() });
    let mut client = bench.ask(two);
    let plan = bench.combiners[0].plan().await;
    tell(&plan, GenerationEvent::Composed(Duration::ZERO));
    token(&plan, 0, 5);
    token(&plan, 1, EOS);
    tell(&plan, GenerationEvent::ChoiceDone { choice: 1, end: ChoiceEnd::Eos });
    token(&plan, 0, 6);
    drop(plan);

    let plan = bench.combiners[1].plan().await;
    assert_eq!((&plan.choices[0].told[..], &plan.choices[1].told[..]), (&[5, 6][..], &[EOS][..]));
    assert_eq!(plan.choices.iter().map(|c| c.sampling.seed).collect::<Vec<_>>(), [7, 7]);
    assert!(!plan.choices[0].cancel.is_cancelled() && plan.choices[1].cancel.is_cancelled());
    token(&plan, 0, 7);
    drop(plan);

    let plan = bench.combiners[2].plan().await;
    assert_eq!(plan.choices[0].told, [5, 6, 7], "lost once more");
    complete(&plan);
    let told = client.rest().await;
    assert_eq!(told.tokens, [vec![5, 6, 7, EOS], vec![EOS]]);
    assert_eq!(told.finished, [(1, FinishReason::Stop), (0, FinishReason::Stop)]);
    assert_eq!(told.end.expect("an answer").usage.completion_tokens, 5);
    bench.settled().await;
}

#[tokio::test(start_paused = true)]
async fn an_answer_whose_last_token_was_told_needs_no_combiner() {
    for (last, reason) in [(EOS, FinishReason::Stop), (9, FinishReason::Length)] {
        let bench = Bench::new(&[&[]], 1, FaultConfig::default());
        let mut client = bench.ask(Ask { max_tokens: 2, ..ask(&[]) });
        let plan = bench.combiners[0].plan().await;
        token(&plan, 0, 5);
        token(&plan, 0, last);
        drop(plan);
        let told = client.rest().await;
        assert_eq!((&told.tokens[0][..], &told.finished[..]), (&[5, last][..], &[(0, reason)][..]));
        told.end.expect("an answer");
        bench.settled().await;
    }
}

#[tokio::test(start_paused = true)]
async fn with_no_other_combiner_in_time_the_answer_ends_with_an_error() {
    for tokens in [0, 2] {
        let bench = Bench::new(&[&[]], 1, FaultConfig::default());
        let mut client = bench.ask(ask(&[ids(1, 30)]));
        let plan = bench.combiners[0].plan().await;
        (0..tokens).for_each(|n| token(&plan, 0, 5 + n));
        tell(&plan, gone());
        let error = client.error().await;
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert!(error.message.contains("combiner-0"), "{error}");
        let waited = client.elapsed();
        assert!(waited >= PATIENCE && waited < PATIENCE + Duration::from_secs(1), "{waited:?}");
        bench.settled().await;
    }
    // At once if the membership lists no other one.
    let listed = |ids: &[Option<&str>]| Some(ids.iter().map(|id| id.map(str::to_owned)).collect());
    for (ids, waits) in [
        (listed(&[]), false),
        (listed(&[Some("combiner-0")]), false),
        (listed(&[None]), false),
        (listed(&[Some("combiner-0"), Some("combiner-1")]), true),
        (listed(&[Some("combiner-1")]), true),
        (listed(&[None, None]), true),
    ] {
        let bench = Bench::new(&[&[]], 1, FaultConfig::default());
        bench.core.fleet.set_listed_combiners(ids.clone());
        let mut client = bench.ask(ask(&[]));
        tell(&bench.combiners[0].plan().await, gone());
        let error = client.error().await;
        assert_eq!((error.kind, client.elapsed() >= PATIENCE), (ErrorKind::Unavailable, waits), "{ids:?}: {error}");
        assert!(waits || client.elapsed() < Duration::from_millis(100), "{ids:?}");
    }
    // Nor longer than the request may take.
    let bench = Bench::new(&[&[]], 1, FaultConfig::default());
    let mut short = ask(&[]);
    short.settings.deadline = Some(short.arrived + Duration::from_secs(3));
    let mut client = bench.ask(short);
    tell(&bench.combiners[0].plan().await, gone());
    assert_eq!(client.error().await.kind, ErrorKind::Deadline);
    assert!(client.elapsed() <= Duration::from_secs(4));
}

#[tokio::test(start_paused = true)]
async fn a_combiner_that_comes_in_time_takes_the_request_up() {
    let mut bench = Bench::new(&[&[]], 1, FaultConfig::default());
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    token(&plan, 0, 5);
    tell(&plan, gone());
    tokio::time::sleep(Duration::from_secs(4)).await;
    bench.combiners.push(TestCombiner::new("combiner-new"));
    bench.show();
    let plan = bench.combiners[1].plan().await;
    assert!(client.elapsed() < Duration::from_secs(5));
    assert_eq!(plan.choices[0].told, [5]);
    complete(&plan);
    assert_eq!(client.rest().await.tokens[0], [5, EOS]);
    bench.settled().await;
}

#[tokio::test(start_paused = true)]
async fn a_stale_state_is_planned_around() {
    let bench = Bench::new(&[&[]], 1, FaultConfig::default());
    let segments = [ids(1, 30), ids(50, 20)];
    let mut client = bench.ask(ask(&segments));
    let plan = bench.combiners[0].plan().await;
    bench.combiners[0].keep(&plan, SEAM);
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    client.report().await;

    let mut client = bench.ask(ask(&segments));
    for covered in [50, 30] {
        let plan = bench.combiners[0].plan().await;
        assert_eq!(plan.resume.expect("a state").tokens, covered);
        tell(&plan, GenerationEvent::Failed(CombineError::StalePrefix));
    }
    let plan = bench.combiners[0].plan().await;
    assert!(plan.resume.is_none() && plan.segments.len() == 2);
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    assert_eq!(client.report().await.usage.prompt_tokens, 51);
    assert!(client.elapsed() < Duration::from_secs(1), "no wait");
    bench.settled().await;
}

#[tokio::test(start_paused = true)]
async fn an_overloaded_combiner_is_replaced_once() {
    let overloaded = || GenerationEvent::Failed(CombineError::Overloaded { waiting: 9 });
    for combiners in 1..=3 {
        let bench = Bench::new(&[&[]], combiners, FaultConfig::default());
        let mut client = bench.ask(ask(&[]));
        for combiner in bench.combiners.iter().take(2) {
            tell(&combiner.plan().await, overloaded());
        }
        let error = client.error().await;
        assert_eq!(error.kind, ErrorKind::Overloaded, "{error}");
        assert!(client.elapsed() < Duration::from_secs(1), "told at once");
        bench.settled().await;
    }
    // An answer that has begun is not refused: there is room again soon.
    let bench = Bench::new(&[&[]], 2, FaultConfig::default());
    let mut client = bench.ask(ask(&[]));
    let plan = bench.combiners[0].plan().await;
    token(&plan, 0, 5);
    tell(&plan, gone());
    tell(&bench.combiners[1].plan().await, overloaded());
    complete(&bench.combiners[1].plan().await);
    assert_eq!(client.rest().await.tokens[0], [5, EOS]);
    bench.settled().await;
}
