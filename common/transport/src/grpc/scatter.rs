//! Scatter workers across processes.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use hypic_cache::EntryKey;
use hypic_proto::v1;
use hypic_proto::v1::prefill_progress::Event;
use hypic_proto::v1::scatter_client::ScatterClient;
use hypic_proto::v1::scatter_server::{Scatter as ScatterRpc, ScatterServer};
use hypic_telemetry::{adopt_metadata, inject_current, names};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::{Instrument, info_span};

use super::{Guarded, Holdings, MESSAGE_LIMIT, Remote, Served, convert, deadline, left_ms};
use crate::{Delivery, JobError, JobOutcome, PrefillJob, Scatter, ToldBacklog};

/// A scatter worker of another process.
pub struct RemoteScatter {
    remote: Arc<dyn Remote>,
    holdings: Arc<Holdings>,
}

impl RemoteScatter {
    /// The worker behind `remote`, which holds what `holdings` says.
    pub fn new(remote: Arc<dyn Remote>, holdings: Arc<Holdings>) -> Self {
        RemoteScatter { remote, holdings }
    }
}

impl Scatter for RemoteScatter {
    fn id(&self) -> &str {
        self.remote.id()
    }

    fn is_running(&self) -> bool {
        self.remote.is_running()
    }

    fn holds(&self, key: EntryKey) -> bool {
        self.holdings.has(key)
    }

    fn backlog(&self) -> Option<ToldBacklog> {
        self.remote.backlog()
    }

    fn prefill(&self, job: PrefillJob) -> BoxFuture<'static, Result<JobOutcome, JobError>> {
        prefill(self.remote.clone(), job).boxed()
    }
}

/// Give a job to a member that serves Scatter.
pub(super) async fn prefill(remote: Arc<dyn Remote>, job: PrefillJob) -> Result<JobOutcome, JobError> {
    let (cancel, down, until) = (job.cancel.clone(), remote.down(), job.deadline);
    let worker = remote.id().to_string();
    let late = async move {
        match until {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        result = call(&*remote, job) => result,
        () = cancel.cancelled() => Err(JobError::Cancelled),
        () = down.cancelled() => Err(JobError::Gone(worker)),
        () = late => Err(JobError::Late(worker)),
    }
}

async fn call(remote: &dyn Remote, job: PrefillJob) -> Result<JobOutcome, JobError> {
    let worker = remote.id();
    let mut client = ScatterClient::new(remote.channel())
        .max_decoding_message_size(MESSAGE_LIMIT)
        .max_encoding_message_size(MESSAGE_LIMIT);
    let sent = Instant::now();
    let entry = v1::EntryIdentity {
        key: convert::key_bytes(job.key.as_bytes()),
        token_ids: job.tokens.to_vec(),
        seam: job.seam as u32,
        anchor_ids: job.anchor.to_vec(),
        salt_hash: Bytes::copy_from_slice(&job.salt),
    };
    let destination =
        v1::Destination { combiner: job.to.combiner.to_string(), transfer: convert::transfer_message(job.to.transfer) };
    let request = v1::PrefillRequest {
        entry: Some(entry),
        destination: Some(destination),
        deadline_ms: left_ms(job.deadline),
        request_id: job.request.to_string(),
        held_only: job.held_only,
    };
    let failed = |status: Status| convert::job_error(worker, &status);
    let mut request = Request::new(request);
    inject_current(request.metadata_mut());
    let mut progress = client.prefill(request).await.map_err(failed)?.into_inner();
    while let Some(message) = progress.message().await.map_err(failed)? {
        if let Some(Event::Done(done)) = message.event {
            let told = convert::outcome(&done, sent);
            return told.map_err(|reason| JobError::Failed { worker: worker.to_string(), reason });
        }
    }
    // The stream ended without a word: not one of ours.
    Err(JobError::Gone(worker.to_string()))
}

/// Serves Scatter for a role of this process.
pub struct ScatterService {
    scatter: Arc<dyn Scatter>,
    served: Served,
}

impl ScatterService {
    /// The service in front of `scatter`, which computes entries of `served`.
    pub fn server(scatter: Arc<dyn Scatter>, served: Served) -> ScatterServer<Self> {
        ScatterServer::new(ScatterService { scatter, served })
            .max_decoding_message_size(MESSAGE_LIMIT)
            .max_encoding_message_size(MESSAGE_LIMIT)
    }
}

#[tonic::async_trait]
impl ScatterRpc for ScatterService {
    type PrefillStream = Guarded<ReceiverStream<Result<v1::PrefillProgress, Status>>>;

    async fn prefill(&self, request: Request<v1::PrefillRequest>) -> Result<Response<Self::PrefillStream>, Status> {
        let span = info_span!(names::SPAN_SCATTER, { names::ATTRIBUTE_MEMBER } = self.scatter.id());
        adopt_metadata(&span, request.metadata());
        let message = request.into_inner();
        let identity = self.served.identity(message.entry)?;
        let destination = message.destination.ok_or_else(|| convert::invalid("destination: missing"))?;
        let transfer = convert::transfer_id(destination.transfer)?;
        let cancel = CancellationToken::new();
        let job = PrefillJob {
            key: identity.key,
            tokens: identity.tokens,
            seam: identity.seam,
            anchor: identity.anchor,
            salt: identity.salt,
            to: Delivery { combiner: destination.combiner.into(), transfer },
            held_only: message.held_only,
            request: message.request_id.into(),
            deadline: deadline(message.deadline_ms),
            cancel: cancel.clone(),
        };
        let (sender, receiver) = mpsc::channel(2);
        let accepted = Instant::now();
        _ = sender.try_send(Ok(progress(Event::Accepted(v1::PrefillAccepted::default()))));
        // Begun inside the span as well: a delivery reads the present one.
        let work = span.in_scope(|| self.scatter.prefill(job));
        let told = async move {
            let told = match work.await {
                Ok(outcome) => Ok(progress(Event::Done(convert::done_message(&outcome, accepted)))),
                Err(error) => Err(convert::job_status(&error)),
            };
            _ = sender.send(told).await;
        };
        tokio::spawn(told.instrument(span));
        Ok(Response::new(Guarded::new(ReceiverStream::new(receiver), cancel)))
    }
}

fn progress(event: Event) -> v1::PrefillProgress {
    v1::PrefillProgress { event: Some(event) }
}
