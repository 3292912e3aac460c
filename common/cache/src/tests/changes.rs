//! What watchers are told.

use super::*;
use crate::{Change, Watch};

/// What a change says, and of which of the segments 0 to 9.
fn told(change: &Change<Block>) -> (&'static str, u32) {
    let (what, about) = match change {
        Change::Entry { key, .. } => ("entry", *key),
        Change::EntryGone(key) => ("gone", *key),
        Change::Begun(key) => ("begun", *key),
        Change::Ended(key) => ("ended", *key),
        Change::Prefix(..) | Change::PrefixGone(_) => panic!("no prefix states here"),
    };
    (what, (0..10).find(|&n| key(n) == about).expect("one of these segments"))
}

async fn next(watch: &mut Watch<Block>) -> (&'static str, u32) {
    told(&watch.next().await.expect("the store is there").expect("nothing is lost"))
}

#[tokio::test]
async fn what_is_in_the_making_is_told_until_it_ends_in_whatever_way() {
    let store = store(1000);
    fill(&store, 0, 100, 1);
    let first = lead(&store, 1);
    let (held, mut watch) = store.watch();
    let mut held: Vec<_> = held.iter().map(told).collect();
    held.sort();
    assert_eq!(held, [("begun", 1), ("entry", 0)], "a late watcher is told of it too");

    let second = lead(&store, 2);
    assert_eq!(next(&mut watch).await, ("begun", 2));
    drop(claim(&store, 2));
    compute(first, 1, 100, 1);
    assert_eq!((next(&mut watch).await, next(&mut watch).await), (("entry", 1), ("ended", 1)));
    second.fail("a test wants it so");
    assert_eq!(next(&mut watch).await, ("ended", 2), "followers are told once, and so are watchers");
    drop(lead(&store, 3));
    assert_eq!((next(&mut watch).await, next(&mut watch).await), (("begun", 3), ("ended", 3)));
    // One that is not kept: it is larger than the store.
    fill(&store, 4, 2000, 1);
    assert_eq!((next(&mut watch).await, next(&mut watch).await), (("begun", 4), ("ended", 4)));
    assert!(store.watch().0.iter().all(|change| told(change).0 == "entry"));
}
