//! One target: dialled, asked who answers, compared, and followed until its connection counts as lost; then again. What
//! does not fit is left out, logged once with both values and counted.

use std::sync::Arc;
use std::time::Duration;

use hypic_proto::v1;
use hypic_proto::v1::node_client::NodeClient;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::beats::{Lost, attend_beats, next_beat};
use super::{Caller, PeersConfig};
use crate::backoff::Backoff;
use crate::board::{Board, Entry, Peer};
use crate::dialer::{DialError, Dialer};
use crate::expected::{Expected, Field, Mismatch, Mismatches};
use crate::membership::Target;
use crate::record::{MemberId, MemberRecord, Protocols, RecordError};

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

/// Visits the targets, one at a time each.
pub(super) struct Visitor {
    pub config: PeersConfig,
    pub caller: Caller,
    pub expected: Expected,
    pub dialer: Dialer,
    pub board: Arc<Board>,
    pub mismatches: Arc<Mismatches>,
}

impl Visitor {
    pub fn wants(&self, target: &Target) -> bool {
        let own = target.record.as_ref().is_some_and(|record| record.id == self.caller.id);
        !own && self.caller.dials.contains(&target.role)
    }

    /// Keep a connection to a target until it is listed no more and its connection is lost.
    pub async fn attend(&self, mut told: watch::Receiver<Option<Target>>) {
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
        let Greeted { mut record, protocol, channel } = greeted;
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
        // It may have loaded its model since it was greeted.
        if let Some(whole) = first.record.clone().filter(|_| record.fingerprint.is_none()) {
            record = match MemberRecord::try_from(whole) {
                Ok(whole) => whole,
                Err(error) => return Visit::Refused(error.into()),
            };
            if let Err(refusal) = self.compare(target, &record) {
                return Visit::Refused(refusal);
            }
        }
        let id = record.id.clone();
        let role = target.role;
        let entry = match self.board.enter(Peer::new(record, protocol, address.to_owned(), channel, &first)) {
            Err(same) => return Visit::Same(same),
            Ok(entry) => entry,
        };
        tracing::info!(%id, %role, address, protocol, "member is up");
        let lost = tokio::select! {
            lost = attend_beats(&mut beats, id.as_str(), limit, |beat| self.take_in(target, &entry, beat)) => lost,
            () = attend_listing(&entry, told) => return Visit::Lived,
        };
        drop(entry);
        tracing::warn!(%id, %role, address, reason = %lost, "member is down");
        match lost {
            Lost::Misfit(mismatch) => Visit::Refused(Refusal::Mismatch { id, mismatch }),
            // It would say the same at once: not dialled again without a pause.
            Lost::Record(error) => Visit::Refused(error.into()),
            _ => Visit::Lived,
        }
    }

    /// Note what a heartbeat says. One that was loading when it was greeted tells its whole record once it is loaded.
    fn take_in(&self, target: &Target, entry: &Entry, mut beat: v1::Heartbeat) -> Result<(), Lost> {
        if let Some(record) = beat.record.take().filter(|_| !entry.peer().is_loaded()) {
            let record = MemberRecord::try_from(record)?;
            if let Err(Refusal::Mismatch { mismatch, .. }) = self.compare(target, &record) {
                return Err(Lost::Misfit(mismatch));
            }
            // One that still lacks its fingerprint says nothing new; the whole one is yet to come.
            if record.fingerprint.is_some() {
                entry.loaded(record);
            }
        }
        entry.beat(&beat);
        Ok(())
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
