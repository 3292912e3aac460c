//! Attempts that come early, late, out of order and twice; sources that fail.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hypic_cache::{Claim, EntryKey, Fingerprint, KeySpace, Lead, Store, StoreConfig};
use hypic_state::{
    DType, EntryLayout, Host, HostKv, HostTensor, LayerKind, LayerPart, RecurrentPart, Stored, Transition,
};

use super::*;

/// Prefix states play no part here.
struct Nothing;

impl Stored for Nothing {
    fn bytes(&self) -> usize {
        0
    }
}

const LAYERS: usize = 2;

fn layout() -> EntryLayout {
    vec![LayerKind::Recurrent, LayerKind::Attention].into()
}

/// The part of a layer, with a mark.
fn part(layer: usize, mark: f32) -> LayerPart<Host> {
    let one = || HostTensor::from_f32([1], &[mark]);
    match layer {
        0 => LayerPart::Recurrent(RecurrentPart { transition: Transition::Scalar(one()), state: one(), tail: None }),
        _ => LayerPart::Attention(HostKv { k: one(), v: one() }),
    }
}

fn store() -> Store<Host, Nothing> {
    Store::new(StoreConfig::default())
}

/// A computation of its own, and it as a source.
fn computation() -> (Lead<Host>, Source<Host>) {
    let tokens: Arc<[u32]> = vec![1, 2].into();
    let space = KeySpace::new(Fingerprint([0; 32]), DType::F32);
    let Claim::Lead(lead) = store().claim(EntryKey::new(&space, 1, &[], b"", &tokens), &tokens, 1) else {
        unreachable!("the store is empty")
    };
    let source = Source::Flight(lead.flight().clone());
    (lead, source)
}

/// A whole entry.
fn entry(mark: f32) -> Source<Host> {
    let (lead, _) = computation();
    publish(&lead, mark);
    Source::Entry(lead.complete(&layout(), Duration::ZERO).expect("all parts"))
}

fn publish(lead: &Lead<Host>, mark: f32) {
    (0..LAYERS).for_each(|layer| assert!(lead.publish(layer, part(layer, mark))));
}

/// What a receiver sees of layer 0: the mark of the part, or the state in a word.
fn seen(incoming: &Incoming<Host>) -> String {
    match incoming.part(0) {
        PartState::Ready(part) => match &*part {
            LayerPart::Recurrent(p) => format!("{}", p.state.to_f32()[0]),
            LayerPart::Attention(_) => unreachable!("layer 0 is recurrent"),
        },
        PartState::Pending => "pending".to_string(),
        PartState::Failed(reason) => format!("failed: {reason}"),
    }
}

/// Counts its calls.
fn counter() -> (Arc<AtomicUsize>, Waker) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    (calls, Arc::new(move || _ = counted.fetch_add(1, Ordering::SeqCst)))
}

fn id() -> TransferId {
    TransferId::random()
}

#[test]
fn what_is_not_open_takes_nothing() {
    let exchange: Exchange<Host> = Exchange::default();
    let transfer = id();
    assert_eq!(exchange.send(transfer, entry(1.0)), Err(Refused::NotOpen));
    let incoming = exchange.open(transfer.id);
    assert_eq!(seen(&incoming), "pending");
    exchange.send(transfer, entry(1.0)).expect("open");
    assert_eq!(seen(&incoming), "1");
    assert_eq!(exchange.open_transfers(), 1);
    drop(incoming);
    assert_eq!(exchange.open_transfers(), 0);
    assert_eq!(exchange.send(transfer, entry(1.0)), Err(Refused::Closed), "a late one is told why");
    assert_eq!(exchange.send(transfer.next(), entry(1.0)), Err(Refused::Closed));
}

#[test]
fn a_later_attempt_takes_the_place_and_an_earlier_one_does_not() {
    let exchange: Exchange<Host> = Exchange::default();
    let first = id();
    let second = first.next();
    let incoming = exchange.open(first.id);
    let (calls, waker) = counter();
    incoming.listen(waker);
    let (_stuck, source) = computation();
    exchange.send(first, source).expect("open");
    exchange.send(second, entry(2.0)).expect("later");
    assert_eq!(seen(&incoming), "2");
    assert_eq!(calls.load(Ordering::SeqCst), 2, "each is news");
    assert_eq!(exchange.send(first, entry(1.0)), Err(Refused::Superseded));
    exchange.send(second.next(), computation().1).expect("later still, and not needed");
    assert_eq!(seen(&incoming), "2", "what is whole stays");
    assert_eq!(calls.load(Ordering::SeqCst), 2, "nothing has changed");
}

#[test]
fn parts_arrive_one_by_one_and_wake() {
    let exchange: Exchange<Host> = Exchange::default();
    for listener_first in [true, false] {
        let transfer = id();
        let (lead, source) = computation();
        let (calls, waker) = counter();
        let incoming = exchange.open(transfer.id);
        if listener_first {
            incoming.listen(waker);
            exchange.send(transfer, source).expect("open");
        } else {
            exchange.send(transfer, source).expect("open");
            incoming.listen(waker);
        }
        for layer in 0..LAYERS {
            let before = calls.load(Ordering::SeqCst);
            assert!(matches!(incoming.part(layer), PartState::Pending));
            lead.publish(layer, part(layer, 5.0));
            assert!(matches!(incoming.part(layer), PartState::Ready(_)));
            assert!(calls.load(Ordering::SeqCst) > before, "a part is news");
        }
        drop(lead.complete(&layout(), Duration::ZERO));
        assert_eq!(seen(&incoming), "5");
    }
}

/// A source that fails leaves the receiver waiting, with what has come before; the next attempt takes up.
#[test]
fn a_failed_source_is_followed_by_another() {
    let exchange: Exchange<Host> = Exchange::default();
    let transfer = id();
    let (calls, waker) = counter();
    let incoming = exchange.open(transfer.id);
    incoming.listen(waker);
    let (lead, source) = computation();
    exchange.send(transfer, source).expect("open");
    lead.publish(0, part(0, 1.0));
    lead.fail("worker died");
    assert_eq!(seen(&incoming), "1", "what has come stays");
    assert!(matches!(incoming.part(1), PartState::Pending), "only the router gives a transfer up");

    let (second, source) = computation();
    exchange.send(transfer.next(), source).expect("later");
    let before = calls.load(Ordering::SeqCst);
    publish(&second, 1.0);
    assert!(calls.load(Ordering::SeqCst) > before, "the second sender's parts wake too");
    assert!(matches!(incoming.part(1), PartState::Ready(_)));
}

/// What a transfer holds goes with its receiver.
#[test]
fn closing_releases_the_source() {
    let store = store();
    let tokens: Arc<[u32]> = vec![1, 2].into();
    let key = EntryKey::new(&KeySpace::new(Fingerprint([0; 32]), DType::F32), 1, &[], b"", &tokens);
    let Claim::Lead(lead) = store.claim(key, &tokens, 1) else { unreachable!("the store is empty") };
    publish(&lead, 1.0);
    drop(lead.complete(&layout(), Duration::ZERO));
    let exchange: Exchange<Host> = Exchange::default();
    let transfer = id();
    let incoming = exchange.open(transfer.id);
    let Claim::Hit(entry) = store.claim(key, &tokens, 1) else { unreachable!("it is kept") };
    exchange.send(transfer, Source::Entry(entry)).expect("open");
    assert_eq!(store.stats().pinned, 1);
    drop(incoming);
    assert_eq!(store.stats().pinned, 0);
}

/// A sender that comes before the plan waits for it, and one that comes after its end is told.
#[tokio::test]
async fn an_early_sender_waits_for_the_plan() {
    let exchange: Exchange<Host> = Exchange::default();
    let transfer = id();
    let waiting = tokio::spawn({
        let exchange = exchange.clone();
        async move { exchange.opened(transfer).await }
    });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    let incoming = exchange.open(transfer.id);
    assert_eq!(waiting.await.expect("no panic"), Ok(()));
    exchange.send(transfer.next(), entry(1.0)).expect("open");
    assert_eq!(exchange.opened(transfer).await, Err(Refused::Superseded));
    drop(incoming);
    assert_eq!(exchange.opened(transfer.next()).await, Err(Refused::Closed));
}

/// Senders and receivers on threads of their own: whoever waits is woken when it has an end.
#[test]
fn nobody_sleeps_through_news() {
    let exchange: Exchange<Host> = Exchange::default();
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get().max(2));
    for round in 0..300 {
        std::thread::scope(|scope| {
            for i in 0..threads {
                let (transfer, exchange) = (id(), &exchange);
                let incoming = exchange.open(transfer.id);
                scope.spawn(move || {
                    let (news, woken) = std::sync::mpsc::channel();
                    incoming.listen(Arc::new(move || _ = news.send(())));
                    for layer in 0..LAYERS {
                        while let PartState::Pending = incoming.part(layer) {
                            let patience = Duration::from_secs(20);
                            woken.recv_timeout(patience).expect("a change wakes its receiver");
                        }
                    }
                });
                scope.spawn(move || {
                    let (first, source) = computation();
                    _ = exchange.send(transfer, source);
                    first.publish(0, part(0, 1.0));
                    if (round + i) % 2 == 0 {
                        first.fail("its worker died");
                        let (second, source) = computation();
                        exchange.send(transfer.next(), source).expect("its receiver waits for a second part");
                        publish(&second, 1.0);
                        drop(second.complete(&layout(), Duration::ZERO));
                    } else {
                        first.publish(1, part(1, 1.0));
                        drop(first.complete(&layout(), Duration::ZERO));
                    }
                });
            }
        });
    }
    assert_eq!(exchange.open_transfers(), 0);
}
