//! Every order of open, receive, send, fail and close.

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

fn quiet() -> Waker {
    Arc::new(|| {})
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Receive,
    Send,
    Fail,
    Close,
}

/// All orders of some acts, each at most once.
fn orders(of: &[Act]) -> Vec<Vec<Act>> {
    let mut orders = vec![Vec::new()];
    for (i, &first) in of.iter().enumerate() {
        let mut rest = of.to_vec();
        rest.remove(i);
        for mut order in self::orders(&rest) {
            order.insert(0, first);
            orders.push(order);
        }
    }
    orders
}

/// After any acts in any order a receiver that came before the close has the last word of the sender's side before it,
/// and has been woken since; one that comes after it gets nothing.
#[test]
fn every_order() {
    for order in orders(&[Act::Receive, Act::Send, Act::Fail, Act::Close]) {
        let exchange: Exchange<Host> = Exchange::default();
        let id = exchange.open();
        let (mut incoming, mut expected, mut open) = (None, "pending".to_string(), true);
        let (calls, waker) = counter();
        for &act in &order {
            let before = calls.load(Ordering::SeqCst);
            match act {
                Act::Receive => {
                    incoming = exchange.receive(id, waker.clone());
                    assert_eq!(incoming.is_some(), open, "{order:?}");
                }
                Act::Send => exchange.send(id, entry(3.0)),
                Act::Fail => exchange.fail(id, "why"),
                Act::Close => {
                    exchange.close(id);
                    open = false;
                }
            }
            let news = match act {
                Act::Send if open => Some("3".to_string()),
                Act::Fail if open => Some("failed: why".to_string()),
                _ => None,
            };
            let woken = calls.load(Ordering::SeqCst) > before;
            assert_eq!(woken, news.is_some() && incoming.is_some(), "woken by news only: {act:?} of {order:?}");
            expected = news.unwrap_or(expected);
            if let Some(incoming) = &incoming {
                assert_eq!(seen(incoming), expected, "{act:?} of {order:?}");
            }
        }
        assert_eq!(exchange.open_transfers(), usize::from(open), "{order:?}");
    }
}

#[test]
fn parts_arrive_one_by_one_and_wake() {
    let exchange: Exchange<Host> = Exchange::default();
    for receiver_first in [true, false] {
        let id = exchange.open();
        let (lead, source) = computation();
        let (calls, waker) = counter();
        let incoming = if receiver_first {
            let incoming = exchange.receive(id, waker).expect("open");
            exchange.send(id, source);
            incoming
        } else {
            exchange.send(id, source);
            exchange.receive(id, waker).expect("open")
        };
        assert_eq!(seen(&incoming), "pending");
        let mut before = calls.load(Ordering::SeqCst);
        for layer in 0..LAYERS {
            assert!(matches!(incoming.part(layer), PartState::Pending));
            lead.publish(layer, part(layer, 5.0));
            assert!(matches!(incoming.part(layer), PartState::Ready(_)));
            assert!(calls.load(Ordering::SeqCst) > before, "a part is news");
            before = calls.load(Ordering::SeqCst);
        }
        // The transfer's end takes nothing from who has it already.
        exchange.close(id);
        drop(lead.complete(&layout(), Duration::ZERO));
        assert_eq!(seen(&incoming), "5");
    }
}

/// A source that fails leaves the receiver waiting, with what has come before; another sender takes up, or the router
/// gives up.
#[test]
fn a_failed_source_is_followed_by_another() {
    let exchange: Exchange<Host> = Exchange::default();
    let id = exchange.open();
    let (calls, waker) = counter();
    let incoming = exchange.receive(id, waker).expect("open");
    let (lead, source) = computation();
    exchange.send(id, source);
    lead.publish(0, part(0, 1.0));
    lead.fail("worker died");
    assert_eq!(seen(&incoming), "1", "what has come stays");
    assert!(matches!(incoming.part(1), PartState::Pending), "only the router gives a transfer up");

    let (second, source) = computation();
    exchange.send(id, source);
    let before = calls.load(Ordering::SeqCst);
    publish(&second, 1.0);
    assert!(calls.load(Ordering::SeqCst) > before, "the second sender's parts wake too");
    assert!(matches!(incoming.part(1), PartState::Ready(_)));
    second.fail("died too");
    exchange.fail(id, "tried often enough");
    assert_eq!(seen(&incoming), "failed: tried often enough");
}

#[test]
fn a_second_receiver_takes_over_the_waking() {
    let exchange: Exchange<Host> = Exchange::default();
    let id = exchange.open();
    let (first_calls, first) = counter();
    let (second_calls, second) = counter();
    let _first = exchange.receive(id, first).expect("open");
    let incoming = exchange.receive(id, second).expect("open");
    exchange.send(id, entry(2.0));
    assert_eq!(seen(&incoming), "2");
    assert_eq!((first_calls.load(Ordering::SeqCst), second_calls.load(Ordering::SeqCst)), (0, 1));
}

#[test]
fn a_transfer_closes_when_dropped_and_is_unknown_then() {
    let exchange: Exchange<Host> = Exchange::default();
    let transfers: Arc<dyn Transfers> = Arc::new(exchange.clone());
    let (a, b) = (Transfer::open(&transfers), Transfer::open(&transfers));
    assert_ne!(a.id(), b.id());
    assert_eq!(exchange.open_transfers(), 2, "clones share the transfers");
    let id = a.id();
    let incoming = exchange.receive(id, quiet()).expect("open");
    drop(a);
    assert_eq!(exchange.open_transfers(), 1);
    exchange.send(id, entry(1.0));
    exchange.fail(id, "nobody hears it");
    assert_eq!(seen(&incoming), "pending", "nothing reaches a closed transfer");
    assert!(exchange.receive(id, quiet()).is_none());
    b.fail("no worker");
    let incoming = exchange.receive(b.id(), quiet()).expect("open");
    assert_eq!(seen(&incoming), "failed: no worker", "a failure waits for its receiver");
}

/// What a transfer holds goes with it.
#[test]
fn closing_releases_the_source() {
    let store = store();
    let tokens: Arc<[u32]> = vec![1, 2].into();
    let key = EntryKey::new(&KeySpace::new(Fingerprint([0; 32]), DType::F32), 1, &[], b"", &tokens);
    let Claim::Lead(lead) = store.claim(key, &tokens, 1) else { unreachable!("the store is empty") };
    publish(&lead, 1.0);
    drop(lead.complete(&layout(), Duration::ZERO));
    let exchange: Exchange<Host> = Exchange::default();
    for received in [false, true] {
        let id = exchange.open();
        let Claim::Hit(entry) = store.claim(key, &tokens, 1) else { unreachable!("it is kept") };
        let incoming = if received { exchange.receive(id, quiet()) } else { None };
        exchange.send(id, Source::Entry(entry));
        assert_eq!(store.stats().pinned, 1);
        exchange.close(id);
        assert_eq!(store.stats().pinned, usize::from(received), "what its receiver has stays there");
        drop(incoming);
        assert_eq!(store.stats().pinned, 0);
    }
}

/// Senders, a router that gives up, and receivers on threads of their own: whoever waits is woken when it has an end.
#[test]
fn nobody_sleeps_through_news() {
    let exchange: Exchange<Host> = Exchange::default();
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get().max(2));
    for round in 0..300 {
        let transfers: Vec<TransferId> = (0..threads).map(|_| exchange.open()).collect();
        std::thread::scope(|scope| {
            for (i, &id) in transfers.iter().enumerate() {
                let exchange = &exchange;
                scope.spawn(move || {
                    let (news, woken) = std::sync::mpsc::channel();
                    let incoming = exchange.receive(id, Arc::new(move || _ = news.send(()))).expect("open");
                    for layer in 0..LAYERS {
                        while let PartState::Pending = incoming.part(layer) {
                            let patience = Duration::from_secs(20);
                            woken.recv_timeout(patience).expect("a change wakes its receiver");
                        }
                    }
                });
                scope.spawn(move || {
                    let (first, source) = computation();
                    exchange.send(id, source);
                    first.publish(0, part(0, 1.0));
                    if (round + i) % 3 == 0 {
                        first.fail("its worker died");
                        let (second, source) = computation();
                        exchange.send(id, source);
                        publish(&second, 1.0);
                        drop(second.complete(&layout(), Duration::ZERO));
                    } else if (round + i) % 3 == 1 {
                        first.publish(1, part(1, 1.0));
                        drop(first.complete(&layout(), Duration::ZERO));
                    } else {
                        first.fail("its worker died");
                        exchange.fail(id, "nobody else");
                    }
                });
            }
        });
        transfers.iter().for_each(|&id| exchange.close(id));
    }
    assert_eq!(exchange.open_transfers(), 0);
}
