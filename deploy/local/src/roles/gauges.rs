//! What a role's process exports of its state: gauges, each of which reads the truth when it is asked for, for as long as
//! its guard lives; and counts that others keep. What is under way is zero when nobody asks: what is not was leaked.

use std::sync::Arc;

use hypic_cache::{Stats, Store};
use hypic_cluster::{Field, Mismatches, Peer, Peers, Role};
use hypic_combiner::{Combiner, CombinerLoad, PrefixState};
use hypic_kernels::Cpu;
use hypic_scatter_worker::Worker;
use hypic_telemetry::{
    EvictionReason, JobState, MemberRole, MismatchField, Observation, Open, SequenceState, names, observe,
};
use hypic_transport::Exchange;

/// Of the entries and prefix states.
pub(super) fn of_store(store: &Store<Cpu, PrefixState<Cpu>>) -> Vec<Observation> {
    let of = |metric, read: fn(Stats) -> usize| {
        let store = store.clone();
        observe(metric, &[], move || read(store.stats()) as u64)
    };
    let evicted = |reason: EvictionReason, read: fn(Stats) -> u64| {
        let store = store.clone();
        observe(&names::EVICTIONS, &[reason.into()], move || read(store.stats()))
    };
    vec![
        of(&names::CACHE_BYTES, |stats| stats.bytes),
        of(&names::CACHE_ENTRIES, |stats| stats.entries),
        of(&names::CACHE_PINNED, |stats| stats.pinned_bytes),
        of(&names::CACHE_FLIGHTS, |stats| stats.flights),
        evicted(EvictionReason::Capacity, |stats| stats.evicted_entries),
        evicted(EvictionReason::Prefix, |stats| stats.evicted_prefix_states),
        evicted(EvictionReason::Boundary, |stats| stats.thinned_boundaries),
    ]
}

/// Of the prefills of a worker, or of a combiner's last resort.
pub(super) fn of_worker(worker: &Arc<Worker<Cpu, PrefixState<Cpu>>>) -> Vec<Observation> {
    let (waiting, computing, tokens) = (worker.clone(), worker.clone(), worker.clone());
    vec![
        observe(&names::JOBS, &[JobState::Waiting.into()], move || waiting.jobs().0),
        observe(&names::JOBS, &[JobState::Computing.into()], move || computing.jobs().1),
        observe(&names::JOB_TOKENS, &[], move || tokens.backlog_tokens()),
    ]
}

/// Of the calls that a role serves.
pub(super) fn of_calls(calls: &Open) -> Observation {
    let calls = calls.clone();
    observe(&names::CALLS, &[], move || calls.count())
}

/// Of the transfers that a worker sends.
pub(super) fn of_deliveries(deliveries: &Open) -> Observation {
    let deliveries = deliveries.clone();
    observe(&names::DELIVERIES, &[], move || deliveries.count())
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
    let (waiting, bytes) = (combiner.clone(), combiner.clone());
    vec![
        observe(&names::SEQUENCE_BYTES, &[], move || bytes.load().state_bytes as u64),
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

/// Of the members that did not fit.
pub(super) fn of_mismatches(mismatches: &Arc<Mismatches>) -> Vec<Observation> {
    let of_field = |field: Field| {
        let mismatches = mismatches.clone();
        observe(&names::MISMATCHES, &[label(field).into()], move || mismatches.get(field))
    };
    Field::ALL.into_iter().map(of_field).collect()
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
