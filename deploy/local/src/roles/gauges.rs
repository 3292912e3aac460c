//! What a role's process exports of its state: gauges, each of which reads the truth when it is asked for, for as long as
//! its guard lives; and counts that others keep, carried over from time to time.

use std::sync::Arc;
use std::time::Duration;

use hypic_cache::Store;
use hypic_cluster::{Field, Mismatches, Peer, Peers, Role};
use hypic_combiner::{Combiner, CombinerLoad, PrefixState};
use hypic_kernels::Cpu;
use hypic_telemetry::{EvictionReason, MemberRole, MismatchField, Observation, SequenceState, metrics, names, observe};
use hypic_transport::Exchange;
use tokio::time::sleep;

/// Of the entries and prefix states.
pub(super) fn of_store(store: &Store<Cpu, PrefixState<Cpu>>) -> Vec<Observation> {
    let (bytes, entries) = (store.clone(), store.clone());
    vec![
        observe(&names::CACHE_BYTES, &[], move || bytes.stats().bytes as u64),
        observe(&names::CACHE_ENTRIES, &[], move || entries.stats().entries as u64),
    ]
}

/// Of the transfers to a combiner.
pub(super) fn of_exchange(exchange: &Exchange<Cpu>) -> Vec<Observation> {
    let exchange = exchange.clone();
    vec![observe(&names::TRANSFERS_OPEN, &[], move || exchange.open_transfers() as u64)]
}

/// Of the answers.
pub(super) fn of_combiner(combiner: &Arc<Combiner<Cpu>>) -> Vec<Observation> {
    let of = |state: SequenceState, read: fn(CombinerLoad) -> usize| {
        let combiner = combiner.clone();
        observe(&names::SEQUENCES, &[state.into()], move || read(combiner.load()) as u64)
    };
    let waiting = combiner.clone();
    vec![
        observe(&names::WAITING, &[], move || waiting.load().waiting as u64),
        of(SequenceState::Waiting, |load| load.waiting),
        of(SequenceState::Prefilling, |load| load.prefilling),
        of(SequenceState::Decoding, |load| load.sequences.saturating_sub(load.prefilling)),
    ]
}

/// Of the members that a router can use.
pub(super) fn of_members(peers: &Peers) -> Vec<Observation> {
    let of_role = |role: Role, label: MemberRole| {
        let live = peers.live();
        let usable = move |peer: &&Arc<Peer>| peer.record().role == role && peer.takes_work();
        observe(&names::MEMBERS, &[label.into()], move || live.borrow().iter().filter(usable).count() as u64)
    };
    vec![of_role(Role::ScatterWorker, MemberRole::ScatterWorker), of_role(Role::Combiner, MemberRole::Combiner)]
}

/// Between two looks at counts that others keep.
const LOOK: Duration = Duration::from_millis(100);

/// Export what goes from a store, until the process ends.
pub(super) async fn count_evictions(store: Store<Cpu, PrefixState<Cpu>>) {
    let mut before = store.stats();
    loop {
        sleep(LOOK).await;
        let now = store.stats();
        for (reason, count) in [
            (EvictionReason::Capacity, now.evicted_entries - before.evicted_entries),
            (EvictionReason::Prefix, now.evicted_prefix_states - before.evicted_prefix_states),
            (EvictionReason::Boundary, now.thinned_boundaries - before.thinned_boundaries),
        ] {
            if count > 0 {
                metrics().evictions(reason, count);
            }
        }
        before = now;
    }
}

/// Export which members did not fit, until the process ends.
pub(super) async fn count_mismatches(mismatches: Arc<Mismatches>) {
    let mut before = [0; Field::ALL.len()];
    loop {
        for (field, told) in Field::ALL.into_iter().zip(&mut before) {
            let now = mismatches.get(field);
            for _ in *told..now {
                metrics().mismatch(label(field));
            }
            *told = now;
        }
        sleep(LOOK).await;
    }
}

fn label(field: Field) -> MismatchField {
    match field {
        Field::Id => MismatchField::Id,
        Field::Role => MismatchField::Role,
        Field::Fingerprint => MismatchField::Fingerprint,
        Field::Dtype => MismatchField::Dtype,
        Field::KernelSet => MismatchField::KernelSet,
        Field::Format => MismatchField::Format,
        Field::Protocol => MismatchField::Protocol,
    }
}
