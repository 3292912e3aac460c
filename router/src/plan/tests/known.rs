//! What is known of members that are elsewhere: what they hold, what they compute, and how fast they send.

use hypic_proto::v1;
use hypic_proto::v1::directory_update::Update;
use hypic_transport::grpc::Holdings;

use super::*;

/// What another process holds or computes is known from its directory, and followed.
#[test]
fn what_other_routers_have_computed_is_not_computed_again() {
    let bench = Bench::new(3);
    let index = bench.core.fleet.index().clone();
    let members: Vec<_> = bench.workers.iter().map(|worker| index.member(&worker.id)).collect();
    let at_combiner = index.member("combiner");
    // They are looked up in the index from now on.
    let view = bench.core.fleet.view();
    bench.core.fleet.set(View { scatter: view.scatter.clone(), combiners: view.combiners.clone() });
    let (held, made, cold, here) = (ids(1, 30), ids(50, 20), ids(150, 25), ids(200, 22));
    bench.workers[0].holds.lock().insert(key(&cold));
    let bytes = |tokens: &[u32]| bytes::Bytes::copy_from_slice(key(tokens).as_bytes());
    let entry = |tokens: &[u32]| v1::DirectoryInsert { key: bytes(tokens), tokens: 1, bytes: 1 << 10 };
    let tell = |member: &Holdings, sequence, update| {
        member.apply(v1::DirectoryUpdate { incarnation: 1, sequence, update: Some(update) }).expect("in order");
    };
    for (i, member) in members.iter().enumerate() {
        let entries = if i == 1 { vec![entry(&held)] } else { Vec::new() };
        tell(member, 0, Update::Snapshot(v1::DirectorySnapshot { entries, ..Default::default() }));
    }
    let entries = vec![entry(&here)];
    tell(&at_combiner, 0, Update::Snapshot(v1::DirectorySnapshot { entries, ..Default::default() }));
    tell(&members[2], 1, Update::Begun(bytes(&made)));

    let segments: [&[u32]; 5] = [&ids(90, 2), &held, &made, &cold, &here];
    let planned = bench.plan(&settings(Mode::Hypic), &segments, &[1]);
    assert_eq!(origins(&planned), ["held worker-1", "worker-2", "worker-0", "(combiner)"]);
    assert_eq!(charged(&planned), [true, false, true, false], "who joins computes nothing");
    drop(planned);
    tell(&members[2], 2, Update::Ended(bytes(&made)));
    members[1].clear();
    let planned = bench.plan(&settings(Mode::Hypic), &segments, &[1]);
    assert_eq!(charged(&planned), [true, true, true, false]);
    assert!(!origins(&planned)[0].starts_with("held"), "what is gone is computed");

    // Each is told of once, though it has come back before its old stay is over.
    let again = index.member("worker-1");
    for member in [&members[1], &again] {
        let entries = vec![entry(&held)];
        tell(member, 0, Update::Snapshot(v1::DirectorySnapshot { entries, ..Default::default() }));
        tell(member, 1, Update::Begun(bytes(&cold)));
    }
    let directory = bench.core.fleet.directory();
    assert_eq!((directory.holders(key(&held)).workers, directory.makers(key(&cold))), (vec![1], vec![1]));
    again.clear();
    members[1].clear();

    // A maker that takes no work is not joined.
    drop(planned);
    tell(&members[2], 3, Update::Begun(bytes(&made)));
    bench.workers[2].running.store(false, Ordering::SeqCst);
    let planned = bench.plan(&settings(Mode::Hypic), &[&ids(90, 2), &made], &[1]);
    assert_eq!(charged(&planned), [true]);
}

/// A link that turns out to be slow makes computing elsewhere the better choice.
#[test]
fn transfers_that_were_seen_decide_between_sending_and_computing() {
    let held = ids(1, 200);
    let bench = Bench::new(2);
    bench.workers[0].holds.lock().insert(key(&held));
    let origin = || origins(&bench.plan(&settings(Mode::Hypic), &[&ids(900, 2), &held], &[1]))[0].clone();
    assert_eq!(origin(), "held worker-0");
    let balancer = bench.core.fleet.balancer();
    let send = |worker: &str, times: usize, takes: Duration| {
        let charge = || balancer.charge_time(worker, Duration::ZERO).expect("known");
        (0..times).for_each(|_| charge().sent(200, 1 << 20, takes));
    };
    send("worker-1", 1, Duration::from_millis(1));
    send("worker-0", 20, Duration::from_secs(1));
    assert_eq!(origin(), "worker-1");
    send("worker-0", 100, Duration::from_millis(1));
    assert_eq!(origin(), "held worker-0");
}
