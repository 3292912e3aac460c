//! Connections to members. Owns one task per target of the membership's view: it dials, asks who answers, compares, and
//! follows heartbeats until the connection counts as lost; then it backs off and begins again. Nothing here fails for
//! good: a member that does not fit is left out, logged once with both values and counted.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use hypic_proto::v1;
use hypic_proto::v1::node_client::NodeClient;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::backoff::{Backoff, BackoffConfig};
use crate::board::{Board, Entry, Live, Peer};
use crate::dialer::{DialError, Dialer};
use crate::expected::{Expected, Field, Mismatch, Mismatches};
use crate::membership::{Target, View};
use crate::record::{MemberId, MemberRecord, Protocols, RecordError, Role};

/// How members are watched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PeersConfig {
    /// A member that is silent for so long is down; also the time to say who it is.
    #[serde(with = "humantime_serde")]
    pub keep_alive: Duration,
    /// Waits between attempts to reach a member.
    pub reconnect: BackoffConfig,
}

impl Default for PeersConfig {
    fn default() -> Self {
        PeersConfig { keep_alive: Duration::from_secs(3), reconnect: BackoffConfig::default() }
    }
}

/// Who dials, and whom.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Own id; a target that turns out to be this process itself is left out.
    pub id: MemberId,
    /// Own role.
    pub role: Role,
    /// Members of these roles are dialled.
    pub dials: Vec<Role>,
}

/// The connections to all members of the view. Dropping it ends them.
#[derive(Debug)]
pub struct Peers {
    board: Arc<Board>,
    mismatches: Arc<Mismatches>,
    _stop: DropGuard,
}

impl Peers {
    /// Dial the members of `view`, now and as it changes. Members that differ from `expected` are not used. Needs a tokio
    /// runtime.
    pub fn start(
        config: PeersConfig,
        caller: Caller,
        expected: Expected,
        dialer: Dialer,
        view: watch::Receiver<View>,
    ) -> Peers {
        let (board, mismatches, stop) = (Board::new(), Arc::new(Mismatches::default()), CancellationToken::new());
        let visitor =
            Visitor { config, caller, expected, dialer, board: board.clone(), mismatches: mismatches.clone() };
        let stopped = stop.clone();
        tokio::spawn(async move { stopped.run_until_cancelled(supervise(Arc::new(visitor), view)).await });
        Peers { board, mismatches, _stop: stop.drop_guard() }
    }

    /// The live members that fit, ordered by id. Changes when one comes, goes, changes its state or its listing; loads
    /// are read from the members.
    pub fn live(&self) -> watch::Receiver<Arc<[Arc<Peer>]>> {
        let live: watch::Receiver<Live> = self.board.live();
        live
    }

    /// The live member of that id.
    pub fn find(&self, id: &str) -> Option<Arc<Peer>> {
        self.board.find(id)
    }

    /// Counts of members that did not fit.
    pub fn mismatches(&self) -> &Arc<Mismatches> {
        &self.mismatches
    }
}

/// What makes a target the same one in two views: the id, and without one the address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Id(MemberId),
    Addresses(Role, Vec<String>),
}

impl Key {
    fn of(target: &Target) -> Key {
        match &target.record {
            Some(record) => Key::Id(record.id.clone()),
            None => Key::Addresses(target.role, target.addresses.clone()),
        }
    }
}

/// Keep one task per target. A task is told when its target leaves the view and ends by itself once its connection is
/// lost; dropping this ends all.
async fn supervise(visitor: Arc<Visitor>, mut view: watch::Receiver<View>) {
    let mut attended: HashMap<Key, watch::Sender<Option<Target>>> = HashMap::new();
    let mut tasks = JoinSet::new();
    let mut view_ended = false;
    loop {
        let targets = view.borrow_and_update().clone();
        let mut listed: HashMap<Key, Target> =
            targets.iter().filter(|target| visitor.wants(target)).map(|t| (Key::of(t), t.clone())).collect();
        for (key, told) in &attended {
            let target = listed.remove(key);
            told.send_if_modified(|known| {
                let changed = *known != target;
                *known = target;
                changed
            });
        }
        for (key, target) in listed {
            let (told, told_here) = watch::channel(Some(target));
            let before = attended.insert(key, told);
            debug_assert!(before.is_none(), "targets that are attended were taken out");
            let visitor = visitor.clone();
            tasks.spawn(async move { visitor.attend(told_here).await });
        }
        tokio::select! {
            // The sender of a fixed view may be gone: what it said last holds.
            changed = view.changed(), if !view_ended => view_ended = changed.is_err(),
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "a connection's task failed and is begun again");
                }
                // Back in the view meanwhile? The next round finds out.
                attended.retain(|_, told| !told.is_closed());
            }
            else => std::future::pending().await,
        }
    }
}

/// Why an attempt brought no connection that could be used.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("no answer to hello: {}", .0.message())]
    Hello(Status),
    #[error("no answer to hello within {0:?}")]
    SilentHello(Duration),
    #[error("an answer to hello without a record")]
    NoRecord,
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("it speaks protocol {theirs} though {ours} was asked for")]
    Protocol { theirs: u32, ours: Protocols },
    #[error("no heartbeat: {0}")]
    NoBeat(Lost),
    #[error("the membership has no address of it")]
    NoAddress,
    #[error("it does not fit: {mismatch}")]
    Mismatch { id: MemberId, mismatch: Mismatch },
}

/// Why a connection counts as lost.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("silent for {0:?}")]
    Silent(Duration),
    #[error("it ended its heartbeats")]
    Ended,
    #[error("the connection broke: {}", .0.message())]
    Broken(Status),
    #[error("{0} answers in its place")]
    Another(String),
}

/// How a visit ended.
enum Visit {
    /// The member was live, and is lost.
    Lived,
    /// It was not used.
    Refused(Refusal),
    /// It is this process itself.
    Own,
    /// It is live already, through another target.
    Same(Arc<Peer>),
}

struct Visitor {
    config: PeersConfig,
    caller: Caller,
    expected: Expected,
    dialer: Dialer,
    board: Arc<Board>,
    mismatches: Arc<Mismatches>,
}

impl Visitor {
    fn wants(&self, target: &Target) -> bool {
        let own = target.record.as_ref().is_some_and(|record| record.id == self.caller.id);
        !own && self.caller.dials.contains(&target.role)
    }

    /// Keep a connection to a target until it is listed no more and its connection is lost.
    async fn attend(&self, mut told: watch::Receiver<Option<Target>>) {
        let mut backoff = Backoff::new(self.config.reconnect.clone());
        let mut complaint = None;
        loop {
            let Some(target) = told.borrow_and_update().clone() else { return };
            match self.visit(&target, &mut told).await {
                Visit::Lived => {
                    backoff.reset();
                    complaint = None;
                }
                Visit::Refused(refusal) => self.complain(&target, refusal, &mut complaint),
                // Somebody else may answer there later: ask again, at leisure.
                Visit::Own => {}
                Visit::Same(peer) => {
                    tokio::select! {
                        () = peer.down().cancelled() => {}
                        changed = told.changed() => if changed.is_err() { return },
                    }
                    backoff.reset();
                }
            }
            tokio::select! {
                () = sleep(backoff.next_wait()) => {}
                changed = told.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    backoff.reset();
                }
            }
        }
    }

    /// Log and count what is new about a refusal.
    fn complain(&self, target: &Target, refusal: Refusal, last: &mut Option<String>) {
        // Without the wording of transport errors, which varies from attempt to attempt.
        let kind = match &refusal {
            Refusal::Mismatch { id, mismatch } => format!("{id} {mismatch}"),
            Refusal::Dial(_) | Refusal::Hello(_) | Refusal::SilentHello(_) | Refusal::NoBeat(_) => "unreachable".into(),
            other => other.to_string(),
        };
        let (role, addresses) = (target.role, &target.addresses);
        if last.as_ref() == Some(&kind) {
            tracing::debug!(%role, ?addresses, error = %refusal, "member still not usable");
            return;
        }
        match &refusal {
            Refusal::Mismatch { id, mismatch: Mismatch { field, ours, theirs } } => {
                self.mismatches.count(*field);
                tracing::error!(%role, ?addresses, %id, %field, ours, theirs, "member does not fit and is not used");
            }
            _ => tracing::warn!(%role, ?addresses, error = %refusal, "member not usable"),
        }
        *last = Some(kind);
    }

    /// One connection: from dialling to its loss.
    async fn visit(&self, target: &Target, told: &mut watch::Receiver<Option<Target>>) -> Visit {
        if let Some(record) = &target.record
            && let Err(refusal) = self.compare(target, record)
        {
            return Visit::Refused(refusal);
        }
        let mut refusal = Refusal::NoAddress;
        for address in &target.addresses {
            let greeted = match self.greet(address).await {
                Ok(greeted) => greeted,
                Err(error) => {
                    refusal = error;
                    continue;
                }
            };
            if greeted.record.id == self.caller.id {
                return Visit::Own;
            }
            if let Err(error) = self.compare(target, &greeted.record) {
                refusal = error;
                continue;
            }
            match self.follow(target, address, greeted, told).await {
                Visit::Refused(error) => refusal = error,
                ended => return ended,
            }
        }
        Visit::Refused(refusal)
    }

    fn compare(&self, target: &Target, record: &MemberRecord) -> Result<(), Refusal> {
        let mismatch = match &target.record {
            Some(known) if known.id != record.id => Some(Mismatch::new(Field::Id, &known.id, &record.id)),
            _ if target.role != record.role => Some(Mismatch::new(Field::Role, target.role, record.role)),
            _ => self.expected.mismatch(record),
        };
        mismatch.map_or(Ok(()), |mismatch| Err(Refusal::Mismatch { id: record.id.clone(), mismatch }))
    }

    /// Dial and ask who answers.
    async fn greet(&self, address: &str) -> Result<Greeted, Refusal> {
        let channel = self.dialer.connect(address).await?;
        let ours = Protocols::OWN;
        let hello = v1::HelloRequest {
            caller: self.caller.id.as_str().to_owned(),
            role: self.caller.role.to_proto().into(),
            protocol_min: *ours.range().start(),
            protocol_max: *ours.range().end(),
        };
        let limit = self.config.keep_alive;
        let answer = timeout(limit, NodeClient::new(channel.clone()).hello(hello)).await;
        let answer = answer.map_err(|_| Refusal::SilentHello(limit))?.map_err(|status| match status.code() {
            Code::FailedPrecondition => Refusal::Mismatch {
                id: address.into(),
                mismatch: Mismatch::new(Field::Protocol, ours, format_args!("another ({})", status.message())),
            },
            _ => Refusal::Hello(status),
        })?;
        let answer = answer.into_inner();
        let record = MemberRecord::try_from(answer.record.ok_or(Refusal::NoRecord)?)?;
        if !ours.range().contains(&answer.protocol) {
            return Err(Refusal::Protocol { theirs: answer.protocol, ours });
        }
        Ok(Greeted { record, protocol: answer.protocol, channel })
    }

    /// Keep a member on the board while its heartbeats come.
    async fn follow(
        &self,
        target: &Target,
        address: &str,
        greeted: Greeted,
        told: &mut watch::Receiver<Option<Target>>,
    ) -> Visit {
        let Greeted { record, protocol, channel } = greeted;
        let limit = self.config.keep_alive;
        let request = v1::BeatRequest {
            caller: self.caller.id.as_str().to_owned(),
            interval_ms: u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).max(1),
        };
        let refused = |lost| Visit::Refused(Refusal::NoBeat(lost));
        let mut client = NodeClient::new(channel.clone());
        let mut beats = match timeout(limit, client.beat(request)).await {
            Err(_) => return refused(Lost::Silent(limit)),
            Ok(Err(status)) => return refused(Lost::Broken(status)),
            Ok(Ok(beats)) => beats.into_inner(),
        };
        let first = match next_beat(&mut beats, record.id.as_str(), limit).await {
            Err(lost) => return refused(lost),
            Ok(first) => first,
        };
        let id = record.id.clone();
        let role = target.role;
        let entry = match self.board.enter(Peer::new(record, protocol, address.to_owned(), channel, &first)) {
            Err(same) => return Visit::Same(same),
            Ok(entry) => entry,
        };
        tracing::info!(%id, %role, address, protocol, "member is up");
        let lost = tokio::select! {
            lost = attend_beats(&mut beats, id.as_str(), limit, |beat| entry.beat(&beat)) => lost,
            () = attend_listing(&entry, told) => return Visit::Lived,
        };
        drop(entry);
        tracing::warn!(%id, %role, address, reason = %lost, "member is down");
        Visit::Lived
    }
}

/// Who answered at an address.
struct Greeted {
    record: MemberRecord,
    protocol: u32,
    channel: Channel,
}

/// Note whether the member is listed; ends only with the supervisor.
async fn attend_listing(entry: &Entry, told: &mut watch::Receiver<Option<Target>>) {
    loop {
        let listed = told.borrow_and_update().is_some();
        if entry.peer().listed() != listed {
            tracing::info!(id = %entry.peer().id(), listed, "the membership changed about a live member");
        }
        entry.set_listed(listed);
        if told.changed().await.is_err() {
            return;
        }
    }
}

/// Pass heartbeats on until the member counts as lost.
async fn attend_beats<S>(beats: &mut S, id: &str, limit: Duration, mut beat: impl FnMut(v1::Heartbeat)) -> Lost
where
    S: Stream<Item = Result<v1::Heartbeat, Status>> + Unpin,
{
    loop {
        match next_beat(beats, id, limit).await {
            Ok(next) => beat(next),
            Err(lost) => return lost,
        }
    }
}

async fn next_beat<S>(beats: &mut S, id: &str, limit: Duration) -> Result<v1::Heartbeat, Lost>
where
    S: Stream<Item = Result<v1::Heartbeat, Status>> + Unpin,
{
    match timeout(limit, beats.next()).await {
        Err(_) => Err(Lost::Silent(limit)),
        Ok(None) => Err(Lost::Ended),
        Ok(Some(Err(status))) => Err(Lost::Broken(status)),
        Ok(Some(Ok(beat))) if beat.id != id => Err(Lost::Another(beat.id)),
        Ok(Some(Ok(beat))) => Ok(beat),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;
    use tokio::sync::mpsc;
    use tokio::time::Instant;

    fn beat(id: &str) -> Result<v1::Heartbeat, Status> {
        Ok(v1::Heartbeat { id: id.into(), ..Default::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_is_lost_when_heartbeats_stop() {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let mut beats = stream::poll_fn(move |context| receiver.poll_recv(context));
        let limit = Duration::from_secs(3);
        let start = Instant::now();
        tokio::spawn(async move {
            for _ in 0..5 {
                sender.send(beat("a")).expect("is read");
                sleep(Duration::from_millis(2900)).await;
            }
            std::future::pending::<()>().await;
            drop(sender);
        });
        let mut seen = 0;
        let lost = attend_beats(&mut beats, "a", limit, |_| seen += 1).await;
        assert!(matches!(lost, Lost::Silent(_)), "{lost}");
        assert_eq!(seen, 5);
        let expected = 4 * Duration::from_millis(2900) + limit;
        assert!(start.elapsed() >= expected && start.elapsed() < expected + Duration::from_millis(50));
    }

    #[tokio::test]
    async fn a_member_is_lost_when_another_answers_or_the_stream_breaks() {
        let limit = Duration::from_secs(3);
        let mut other = stream::iter([beat("a"), beat("b")]);
        assert!(matches!(attend_beats(&mut other, "a", limit, |_| {}).await, Lost::Another(id) if id == "b"));
        let mut broken = stream::iter([beat("a"), Err(Status::unavailable("gone"))]);
        assert!(matches!(attend_beats(&mut broken, "a", limit, |_| {}).await, Lost::Broken(_)));
        let mut ended = stream::iter([beat("a")]);
        assert!(matches!(attend_beats(&mut ended, "a", limit, |_| {}).await, Lost::Ended));
    }
}
