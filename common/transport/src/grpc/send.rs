//! The sending end of the transport between processes: one stream per transfer, a part as soon as it is final.
//!
//! Memory is bounded: a part is encoded when it is its turn, and few of its chunks wait for the connection's window. What
//! can go wrong: the combiner is unknown to this worker, the connection breaks, or the combiner wants no more of it;
//! each is an error of its own.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use hypic_cache::Source;
use hypic_kernels::{Backend, part_to_host};
use hypic_proto::v1;
use hypic_proto::v1::combine_client::CombineClient;
use hypic_proto::v1::transfer_message::Message;
use hypic_state::codec::encode;
use hypic_state::{EntryLayout, LayerKind, LayerPart, PartSource, PartState};
use hypic_telemetry::inject_current;
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tracing::Instrument;

use super::{GrpcConfig, MESSAGE_LIMIT, Served, convert};
use crate::{Delivered, DeliveryError, Parcel, Transport};

/// Finds the connection to a combiner that stands in this worker's own view.
pub type Resolve = Arc<dyn Fn(&str) -> Option<Channel> + Send + Sync>;

/// Sends layer parts over gRPC.
pub struct GrpcTransport<B: Backend> {
    shared: Arc<Shared<B>>,
}

struct Shared<B: Backend> {
    config: GrpcConfig,
    backend: B,
    layout: EntryLayout,
    served: Served,
    resolve: Resolve,
}

impl<B: Backend> GrpcTransport<B> {
    /// Sends entries of `layout`, computed on `backend`, to combiners that `resolve` finds.
    pub fn new(config: GrpcConfig, backend: B, layout: EntryLayout, served: Served, resolve: Resolve) -> Self {
        GrpcTransport { shared: Arc::new(Shared { config, backend, layout, served, resolve }) }
    }
}

impl<B: Backend> Transport<B> for GrpcTransport<B> {
    fn deliver(&self, parcel: Parcel<B>) -> BoxFuture<'static, Result<Delivered, DeliveryError>> {
        let shared = self.shared.clone();
        async move { shared.deliver(parcel).await }.in_current_span().boxed()
    }
}

impl<B: Backend> Shared<B> {
    async fn channel(&self, combiner: &str) -> Result<Channel, DeliveryError> {
        const BETWEEN_LOOKS: std::time::Duration = std::time::Duration::from_millis(20);
        let found = async {
            loop {
                if let Some(channel) = (self.resolve)(combiner) {
                    return channel;
                }
                sleep(BETWEEN_LOOKS).await;
            }
        };
        timeout(self.config.member_wait, found).await.map_err(|_| DeliveryError::Unknown(combiner.to_string()))
    }

    async fn deliver(&self, parcel: Parcel<B>) -> Result<Delivered, DeliveryError> {
        let channel = self.channel(&parcel.to.combiner).await?;
        let mut client = CombineClient::new(channel)
            .max_decoding_message_size(MESSAGE_LIMIT)
            .max_encoding_message_size(MESSAGE_LIMIT);
        let (messages, stream) = mpsc::channel(self.config.chunks_ahead);
        let mut request = tonic::Request::new(ReceiverStream::new(stream));
        inject_current(request.metadata_mut());
        if let Some(deadline) = parcel.deadline {
            request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        let mut answer = std::pin::pin!(client.receive(request));
        let mut sending = std::pin::pin!(self.send(&parcel, messages).fuse());
        let mut sent = None;
        loop {
            tokio::select! {
                biased;
                // The combiner may have all it wants before everything is sent.
                answer = &mut answer => {
                    let Sent { bytes, last_ready } = sent.unwrap_or_default();
                    return match answer {
                        Ok(_) => Ok(Delivered { bytes, exposed: last_ready.map(|at| at.elapsed()).unwrap_or_default() }),
                        Err(status) => Err(refusal(&status)),
                    };
                }
                done = &mut sending, if sent.is_none() => match done {
                    Ok(all) => sent = Some(all),
                    Err(Stopped::Source(reason)) => return Err(DeliveryError::Source(reason)),
                    // The answer says why.
                    Err(Stopped::Closed) => sent = Some(Sent::default()),
                },
            }
        }
    }

    async fn send(&self, parcel: &Parcel<B>, messages: mpsc::Sender<v1::TransferMessage>) -> Result<Sent, Stopped> {
        let (source, transfer) = (&parcel.source, convert::transfer_message(parcel.to.transfer));
        let (tokens, seam) = (source.tokens().clone(), source.seam());
        let entry = v1::EntryIdentity {
            key: convert::key_bytes(parcel.key.as_bytes()),
            token_ids: tokens.to_vec(),
            seam: seam as u32,
            anchor_ids: parcel.anchor.to_vec(),
            salt_hash: Bytes::copy_from_slice(&parcel.salt),
        };
        let header = v1::TransferHeader {
            transfer,
            entry: Some(entry),
            format_version: u32::from(self.served.space.format),
            model_fingerprint: convert::key_bytes(&self.served.space.fingerprint.0),
            layers: self.layout.len() as u32,
        };
        tell(&messages, Message::Header(header)).await?;

        let news = Arc::new(Notify::new());
        let waker = news.clone();
        source.subscribe(Arc::new(move || waker.notify_one()));
        let mut sent = Sent::default();
        for layer in 0..self.layout.len() {
            let part = match ready(source, layer, &news).await {
                Ok(part) => part,
                Err(reason) => {
                    _ = tell(&messages, Message::Abort(v1::TransferAbort { transfer, reason: reason.clone() })).await;
                    return Err(Stopped::Source(reason));
                }
            };
            sent.last_ready = Some(Instant::now());
            let encoded = encode(&part_to_host(&self.backend, &part));
            let kind = match self.layout[layer] {
                LayerKind::Recurrent => v1::PartKind::Recurrent,
                LayerKind::Attention => v1::PartKind::Attention,
            };
            let part_bytes = encoded.len() as u64;
            for at in (0..encoded.len()).step_by(self.config.chunk_bytes) {
                let data = encoded.slice(at..encoded.len().min(at + self.config.chunk_bytes));
                let chunk = v1::PartChunk {
                    transfer,
                    key: convert::key_bytes(parcel.key.as_bytes()),
                    layer: layer as u32,
                    kind: kind as i32,
                    token_begin: seam as u32,
                    token_end: tokens.len() as u32,
                    offset: at as u64,
                    part_bytes,
                    crc32c: crc32c::crc32c(&data),
                    data,
                };
                tell(&messages, Message::Chunk(chunk)).await?;
            }
            sent.bytes += part_bytes;
        }
        let end = v1::TransferEnd { transfer, parts: self.layout.len() as u32, bytes: sent.bytes };
        tell(&messages, Message::End(end)).await?;
        Ok(sent)
    }
}

#[derive(Clone, Copy, Default)]
struct Sent {
    bytes: u64,
    last_ready: Option<Instant>,
}

/// Why the sending stopped.
enum Stopped {
    /// The entry was not made.
    Source(String),
    /// The combiner reads no more.
    Closed,
}

async fn tell(messages: &mpsc::Sender<v1::TransferMessage>, message: Message) -> Result<(), Stopped> {
    messages.send(v1::TransferMessage { message: Some(message) }).await.map_err(|_| Stopped::Closed)
}

/// The part of `layer`, once it is final.
async fn ready<B: Backend>(source: &Source<B>, layer: usize, news: &Notify) -> Result<Arc<LayerPart<B>>, String> {
    loop {
        match source.part(layer) {
            PartState::Ready(part) => return Ok(part),
            PartState::Failed(reason) => return Err(reason.to_string()),
            PartState::Pending => news.notified().await,
        }
    }
}

fn refusal(status: &Status) -> DeliveryError {
    let message = status.message().to_string();
    match status.code() {
        Code::FailedPrecondition | Code::NotFound | Code::Cancelled => DeliveryError::Unwanted(message),
        _ => DeliveryError::Failed(message),
    }
}
