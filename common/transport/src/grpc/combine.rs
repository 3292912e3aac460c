//! Combiners across processes.

use std::sync::Arc;

use dashmap::DashMap;
use futures::future::{BoxFuture, FutureExt, select_all};
use hypic_cache::{EntryKey, PrefixKey};
use hypic_kernels::Backend;
use hypic_proto::v1;
use hypic_proto::v1::combine_client::CombineClient;
use hypic_proto::v1::combine_server::{Combine as CombineRpc, CombineServer};
use hypic_state::Stored;
use hypic_telemetry::{adopt_metadata, inject_current, names};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use tracing::{Instrument, debug, info_span};

use super::{Guarded, Holdings, MESSAGE_LIMIT, Receiver, Remote, Served, convert, plans, scatter};
use crate::{Combine, CombineError, CombineLoad, GenerationEvent, JobError, JobOutcome, Plan, PrefillJob, PrefixHit};

/// A combiner of another process.
pub struct RemoteCombine {
    remote: Arc<dyn Remote>,
    holdings: Arc<Holdings>,
}

impl RemoteCombine {
    /// The combiner behind `remote`, which holds what `holdings` says.
    pub fn new(remote: Arc<dyn Remote>, holdings: Arc<Holdings>) -> Self {
        RemoteCombine { remote, holdings }
    }
}

impl Combine for RemoteCombine {
    fn id(&self) -> &str {
        self.remote.id()
    }

    fn is_running(&self) -> bool {
        self.remote.is_running()
    }

    fn load(&self) -> CombineLoad {
        self.remote.load()
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.holdings.has(key)
    }

    fn prefix_lengths(&self, root: PrefixKey) -> Vec<usize> {
        self.holdings.prefix_lengths(root)
    }

    fn prefix(&self, keys: &[PrefixKey]) -> Option<PrefixHit> {
        keys.iter().find_map(|&key| self.holdings.prefix(key))
    }

    fn prefix_room(&self, tokens: usize) -> (usize, usize) {
        let (fixed, per_token, budget) = self.remote.prefix_sizes();
        (fixed + tokens * per_token, budget)
    }

    fn generate(&self, plan: Plan) {
        tokio::spawn(run(self.remote.clone(), plan).in_current_span());
    }

    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        scatter::prefill(self.remote.clone(), job).boxed()
    }
}

async fn run(remote: Arc<dyn Remote>, plan: Plan) {
    let events = plan.events.clone();
    let (cancel, down) = (plan.cancel.clone(), remote.down());
    let failure = tokio::select! {
        biased;
        result = call(&*remote, &plan) => result.err(),
        () = cancel.cancelled() => Some(CombineError::Cancelled),
        () = events.closed() => None,
        () = down.cancelled() => Some(CombineError::Gone(remote.id().to_string())),
    };
    if let Some(error) = failure {
        debug!(combiner = remote.id(), request = %plan.request, %error, "a plan was not carried out");
        _ = events.send(GenerationEvent::Failed(error));
    }
}

fn client(channel: Channel) -> CombineClient<Channel> {
    CombineClient::new(channel).max_decoding_message_size(MESSAGE_LIMIT).max_encoding_message_size(MESSAGE_LIMIT)
}

async fn call(remote: &dyn Remote, plan: &Plan) -> Result<(), CombineError> {
    let failed = |status: Status| convert::combine_error(remote.id(), &status);
    let mut client = client(remote.channel());
    let mut request = Request::new(plans::to_message(plan));
    inject_current(request.metadata_mut());
    let mut stream = client.generate(request).await.map_err(failed)?.into_inner();
    let mut cancellations = std::pin::pin!(cancel_choices(remote, plan).fuse());
    loop {
        let message = tokio::select! {
            biased;
            message = stream.message() => message.map_err(failed)?,
            () = &mut cancellations => continue,
        };
        let Some(message) = message else {
            // It ended without a word: not one of ours.
            return Err(CombineError::Gone(remote.id().to_string()));
        };
        let event = convert::event(message, plan.segments.len(), plan.choices.len()).map_err(CombineError::Internal)?;
        let Some(event) = event else { continue };
        let last = matches!(event, GenerationEvent::Done);
        if plan.events.send(event).is_err() || last {
            return Ok(());
        }
    }
}

/// Tell the combiner of every answer that is no longer wanted.
async fn cancel_choices(remote: &dyn Remote, plan: &Plan) {
    let mut open: Vec<usize> = (0..plan.choices.len()).filter(|&i| !plan.choices[i].cancel.is_cancelled()).collect();
    while !open.is_empty() {
        let waits = open.iter().map(|&i| plan.choices[i].cancel.cancelled().boxed());
        let ((), at, _) = select_all(waits).await;
        let choice = open.swap_remove(at) as u32;
        let request = v1::CancelChoiceRequest { request_id: plan.request.to_string(), choice };
        // If the connection is broken the whole plan is.
        _ = client(remote.channel()).cancel_choice(request).await;
    }
}

/// Serves Combine for the combiner of this process.
pub struct CombineService<B: Backend, P: Stored> {
    combine: Arc<dyn Combine>,
    receiver: Receiver<B, P>,
    served: Served,
    running: Arc<DashMap<String, Vec<CancellationToken>>>,
}

impl<B: Backend, P: Stored> CombineService<B, P> {
    /// The service in front of `combine`, whose entries arrive through `receiver`.
    pub fn server(combine: Arc<dyn Combine>, receiver: Receiver<B, P>, served: Served) -> CombineServer<Self> {
        CombineServer::new(CombineService { combine, receiver, served, running: Arc::default() })
            .max_decoding_message_size(MESSAGE_LIMIT)
            .max_encoding_message_size(MESSAGE_LIMIT)
    }
}

type Events = std::pin::Pin<Box<dyn futures::Stream<Item = Result<v1::CombineEvent, Status>> + Send>>;

#[tonic::async_trait]
impl<B: Backend, P: Stored> CombineRpc for CombineService<B, P> {
    type GenerateStream = Guarded<Events>;

    async fn generate(&self, request: Request<v1::CombineRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let span = info_span!(names::SPAN_COMPOSE, { names::ATTRIBUTE_SEGMENTS } = request.get_ref().items.len());
        adopt_metadata(&span, request.metadata());
        let message = request.into_inner();
        let cancel = CancellationToken::new();
        let (sender, events) = mpsc::unbounded_channel();
        let plan = plans::from_message(message, self.served.vocab, &cancel, sender)?;
        let listed = Listed::new(&self.running, &plan);
        self.combine.generate(plan);
        // The span ends with the last event.
        let mut listed = Some((listed, span));
        let accepted = v1::combine_event::Event::Accepted(v1::CombineAccepted {});
        let accepted = futures::stream::iter([Ok(v1::CombineEvent { event: Some(accepted) })]);
        let told = UnboundedReceiverStream::new(events).map(move |event| {
            if matches!(event, GenerationEvent::Done | GenerationEvent::Failed(_)) {
                listed.take();
            }
            convert::event_message(event)
        });
        let events: Events = Box::pin(futures::StreamExt::chain(accepted, told));
        Ok(Response::new(Guarded::new(events, cancel)))
    }

    async fn cancel_choice(
        &self,
        request: Request<v1::CancelChoiceRequest>,
    ) -> Result<Response<v1::CancelChoiceResponse>, Status> {
        let v1::CancelChoiceRequest { request_id, choice } = request.into_inner();
        let token = self.running.get(&request_id).and_then(|tokens| tokens.get(choice as usize).cloned());
        if let Some(token) = &token {
            token.cancel();
        }
        Ok(Response::new(v1::CancelChoiceResponse { found: token.is_some() }))
    }

    async fn receive(
        &self,
        request: Request<Streaming<v1::TransferMessage>>,
    ) -> Result<Response<v1::ReceiveResponse>, Status> {
        let span = info_span!(names::SPAN_TRANSFER);
        adopt_metadata(&span, request.metadata());
        let used = self.receiver.receive(request.into_inner()).instrument(span).await;
        let used = used.inspect_err(|status| debug!(reason = status.message(), "a transfer was not taken"))?;
        Ok(Response::new(v1::ReceiveResponse { used }))
    }
}

/// A running request's line among those whose answers can be cancelled.
struct Listed {
    running: Arc<DashMap<String, Vec<CancellationToken>>>,
    request: String,
}

impl Listed {
    fn new(running: &Arc<DashMap<String, Vec<CancellationToken>>>, plan: &Plan) -> Self {
        let request = plan.request.to_string();
        running.insert(request.clone(), plan.choices.iter().map(|c| c.cancel.clone()).collect());
        Listed { running: running.clone(), request }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.running.remove(&self.request);
    }
}
