//! What a member says about itself. Owns the state that a program sets and the Node service that tells it: an answer to
//! Hello, and heartbeats. A caller that speaks no common protocol is refused; a caller that stops reading loses its
//! heartbeats and nothing else.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::Stream;
use futures::stream;
use hypic_proto::v1;
use hypic_proto::v1::node_server::{Node, NodeServer};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::record::{MemberRecord, Protocols};

/// What a member is able to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// It loads its model: no work yet.
    Loading,
    /// It takes work.
    Serving,
    /// It finishes what it has and takes nothing new.
    Draining,
}

impl NodeState {
    fn to_proto(self) -> v1::MemberState {
        match self {
            NodeState::Loading => v1::MemberState::Loading,
            NodeState::Serving => v1::MemberState::Serving,
            NodeState::Draining => v1::MemberState::Draining,
        }
    }

    /// From the number in a message. What is unknown takes no work, as while loading.
    pub(crate) fn from_proto(number: i32) -> NodeState {
        match v1::MemberState::try_from(number) {
            Ok(v1::MemberState::Serving) => NodeState::Serving,
            Ok(v1::MemberState::Draining) => NodeState::Draining,
            _ => NodeState::Loading,
        }
    }
}

/// What a member has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeLoad {
    /// Tokens that it still has to prefill in isolation.
    pub backlog_tokens: u64,
    /// Of a combiner: answers under way, prompts included.
    pub sequences: u32,
    /// Of a combiner: requests that wait for a place.
    pub waiting: u32,
}

/// What a member says about itself, shared by the program that sets it and the service that tells it.
pub struct NodeStatus {
    record: MemberRecord,
    /// The record with all that is known once the model is loaded.
    whole: OnceLock<MemberRecord>,
    state: watch::Sender<NodeState>,
    load: Arc<dyn Fn() -> NodeLoad + Send + Sync>,
    closed: CancellationToken,
}

impl fmt::Debug for NodeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeStatus")
            .field("record", self.record())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl NodeStatus {
    /// A member that is loading; what its record does not say yet follows with [`loaded`](Self::loaded). `load` is
    /// asked at every heartbeat and must not block. `closed` ends all heartbeats: others then take the member for dead,
    /// so cancel it when its work is done, together with the server's shutdown.
    pub fn new(
        record: MemberRecord,
        load: Arc<dyn Fn() -> NodeLoad + Send + Sync>,
        closed: CancellationToken,
    ) -> Arc<NodeStatus> {
        Arc::new(NodeStatus {
            record,
            whole: OnceLock::new(),
            state: watch::Sender::new(NodeState::Loading),
            load,
            closed,
        })
    }

    /// Who the member is, as far as it is known.
    pub fn record(&self) -> &MemberRecord {
        self.whole.get().unwrap_or(&self.record)
    }

    /// The model is loaded: from now on this is the record, and the member serves. All callers are told at once.
    pub fn loaded(&self, record: MemberRecord) {
        debug_assert!(record.id == self.record.id && record.fingerprint.is_some(), "{record:?}");
        let first = self.whole.set(record).is_ok();
        debug_assert!(first, "a model is loaded once");
        self.set_state(NodeState::Serving);
    }

    /// What it is able to do.
    pub fn state(&self) -> NodeState {
        *self.state.borrow()
    }

    /// Set what it is able to do; told to all callers at once.
    pub fn set_state(&self, state: NodeState) {
        self.state.send_if_modified(|current| std::mem::replace(current, state) != state);
    }

    fn heartbeat(&self, state: NodeState, record: Option<&MemberRecord>) -> v1::Heartbeat {
        let load = (self.load)();
        v1::Heartbeat {
            record: record.map(Into::into),
            id: self.record.id.as_str().to_owned(),
            state: state.to_proto().into(),
            backlog_tokens: load.backlog_tokens,
            sequences: load.sequences,
            waiting: load.waiting,
        }
    }
}

/// The Node service of a member.
#[derive(Clone, Debug)]
pub struct NodeService(Arc<NodeStatus>);

impl NodeService {
    /// The service, ready to be served.
    pub fn server(status: Arc<NodeStatus>) -> NodeServer<NodeService> {
        NodeServer::new(NodeService(status))
    }
}

type Beats = Pin<Box<dyn Stream<Item = Result<v1::Heartbeat, Status>> + Send>>;

#[tonic::async_trait]
impl Node for NodeService {
    async fn hello(&self, request: Request<v1::HelloRequest>) -> Result<Response<v1::HelloResponse>, Status> {
        let caller = request.into_inner();
        let theirs = Protocols::new(caller.protocol_min, caller.protocol_max).ok_or_else(|| {
            let (min, max) = (caller.protocol_min, caller.protocol_max);
            Status::invalid_argument(format!("protocol range {min}..={max} is empty or begins below 1"))
        })?;
        let record = self.0.record();
        let own = record.protocols;
        let protocol = own.negotiate(theirs).ok_or_else(|| {
            Status::failed_precondition(format!("no common protocol: {own} here, {theirs} at {}", caller.caller))
        })?;
        Ok(Response::new(v1::HelloResponse { record: Some(record.into()), protocol }))
    }

    type BeatStream = Beats;

    async fn beat(&self, request: Request<v1::BeatRequest>) -> Result<Response<Beats>, Status> {
        /// Shorter intervals would only cost time.
        const SHORTEST: Duration = Duration::from_millis(10);
        /// Heartbeats per promised interval, so that a late one is no missed one.
        const PER_INTERVAL: u32 = 3;
        let request = request.into_inner();
        if request.interval_ms == 0 {
            return Err(Status::invalid_argument("interval_ms is 0: ask for at least 1"));
        }
        let period = (Duration::from_millis(request.interval_ms.into()) / PER_INTERVAL).max(SHORTEST);
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (status, changes) = (self.0.clone(), self.0.state.subscribe());
        let beats =
            stream::unfold((status, changes, ticks, false), |(status, mut changes, mut ticks, told)| async move {
                tokio::select! {
                    biased;
                    () = status.closed.cancelled() => return None,
                    changed = changes.changed() => changed.ok()?,
                    _ = ticks.tick() => {}
                }
                let state = *changes.borrow_and_update();
                let whole = status.record().fingerprint.is_some();
                let beat = status.heartbeat(state, (whole && !told).then(|| status.record()));
                Some((Ok(beat), (status, changes, ticks, whole)))
            });
        Ok(Response::new(Box::pin(beats)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Role;
    use futures::StreamExt;
    use tokio::time::{Instant, advance};
    use tonic::Code;

    fn service() -> (Arc<NodeStatus>, NodeService) {
        let record = MemberRecord {
            id: "combiner-1".into(),
            role: Role::Combiner,
            addresses: vec!["127.0.0.1:1".into()],
            fingerprint: None,
            dtype: "f32".into(),
            kernel_set: "portable-v1".into(),
            format: 1,
            protocols: Protocols::OWN,
            prefix_fixed_bytes: 1,
            prefix_token_bytes: 2,
            prefix_budget_bytes: 3,
        };
        let load = Arc::new(|| NodeLoad { backlog_tokens: 4, sequences: 5, waiting: 6 });
        let status = NodeStatus::new(record, load, CancellationToken::new());
        (status.clone(), NodeService(status))
    }

    fn hello(min: u32, max: u32) -> Request<v1::HelloRequest> {
        Request::new(v1::HelloRequest { caller: "me".into(), role: 1, protocol_min: min, protocol_max: max })
    }

    #[tokio::test]
    async fn hello_tells_the_record_and_the_protocol() {
        let (status, service) = service();
        let answer = service.hello(hello(1, 9)).await.expect("answers").into_inner();
        assert_eq!(answer.protocol, 1);
        assert_eq!(MemberRecord::try_from(answer.record.expect("has a record")).as_ref(), Ok(status.record()));
        assert_eq!(service.hello(hello(2, 9)).await.expect_err("refused").code(), Code::FailedPrecondition);
        assert_eq!(service.hello(hello(0, 9)).await.expect_err("refused").code(), Code::InvalidArgument);
    }

    #[tokio::test(start_paused = true)]
    async fn heartbeats_come_at_once_in_time_and_on_changes() {
        let (status, service) = service();
        let request = |interval_ms| Request::new(v1::BeatRequest { caller: "me".into(), interval_ms });
        assert_eq!(service.beat(request(0)).await.err().expect("refused").code(), Code::InvalidArgument);
        let mut beats = service.beat(request(3000)).await.expect("beats").into_inner();
        let start = Instant::now();
        let first = beats.next().await.expect("a beat").expect("no error");
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert_eq!((first.state, first.backlog_tokens, first.sequences, first.waiting), (1, 4, 5, 6));
        beats.next().await.expect("a beat").expect("no error");
        assert!((Duration::from_secs(1)..Duration::from_millis(1010)).contains(&start.elapsed()));
        advance(Duration::from_millis(300)).await;
        let whole = MemberRecord { fingerprint: Some([7; 32]), ..status.record().clone() };
        status.loaded(whole.clone());
        let changed = beats.next().await.expect("a beat").expect("no error");
        assert_eq!(changed.state, v1::MemberState::Serving as i32);
        assert_eq!(MemberRecord::try_from(changed.record.expect("has the record")), Ok(whole));
        assert!(start.elapsed() < Duration::from_millis(1310));
        assert!(beats.next().await.expect("a beat").expect("no error").record.is_none(), "told once");
        status.closed.cancel();
        assert!(beats.next().await.is_none());
    }
}
