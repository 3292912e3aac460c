//! The sending end of the transport between processes: one stream per transfer, a part as soon as it is final, K and V as
//! soon as the pass that makes them.
//!
//! Memory is bounded however slow the receiver is: K and V that wait for their turn ([`KvAhead`] declines more), one range
//! or recurrent part encoded, and few chunks of it that wait for the connection's window. What can go wrong: the combiner is unknown to this worker, the connection breaks, or the combiner wants no more of it;
//! each is an error of its own.

use std::ops::Range;
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

use super::assembly::wire_kind;
use super::{GrpcConfig, MESSAGE_LIMIT, Served, convert};
use crate::{Delivered, DeliveryError, KvAhead, KvRange, Parcel, Transport};

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
    fn ahead(&self) -> Option<KvAhead<B>> {
        Some(KvAhead::new(self.shared.config.ahead_bytes))
    }

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
                    let Sent { bytes, hidden_bytes, all_ready, .. } = sent.unwrap_or_default();
                    let exposed = all_ready.map(|at| at.elapsed()).unwrap_or_default();
                    return match answer {
                        Ok(_) => Ok(Delivered { bytes, hidden_bytes, exposed }),
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

        let mut outgoing = Outgoing {
            shared: self,
            key: convert::key_bytes(parcel.key.as_bytes()),
            transfer,
            seam,
            messages,
            sent_tokens: vec![Vec::new(); self.layout.len()],
            sent: Sent::default(),
        };
        outgoing.parts(source, parcel.ahead.as_deref()).await?;
        Ok(outgoing.sent)
    }
}

/// A transfer being sent.
struct Outgoing<'a, B: Backend> {
    shared: &'a Shared<B>,
    key: Bytes,
    transfer: Option<v1::TransferId>,
    seam: usize,
    messages: mpsc::Sender<v1::TransferMessage>,
    /// Per layer, the tokens of the body whose K and V were sent ahead of the part: ascending, disjoint.
    sent_tokens: Vec<Vec<Range<usize>>>,
    sent: Sent,
}

#[derive(Clone, Copy, Default)]
struct Sent {
    parts: u32,
    bytes: u64,
    /// Of those that were sent while not all was final.
    hidden_bytes: u64,
    /// When all was.
    all_ready: Option<Instant>,
}

/// Why the sending stopped.
enum Stopped {
    /// The entry was not made.
    Source(String),
    /// The combiner reads no more.
    Closed,
}

impl<B: Backend> Outgoing<'_, B> {
    /// Everything, in the order in which a composition needs it: the parts that are final by layer, and while the next is
    /// not, what has come of later ones.
    async fn parts(&mut self, source: &Source<B>, ahead: Option<&KvAhead<B>>) -> Result<(), Stopped> {
        let news = Arc::new(Notify::new());
        let waker = news.clone();
        source.subscribe(Arc::new(move || waker.notify_one()));
        let (mut layer, layers) = (0, self.shared.layout.len());
        while layer < layers {
            // Parts become final in the order of the layers.
            if self.sent.all_ready.is_none() && matches!(source.part(layers - 1), PartState::Ready(_)) {
                self.sent.all_ready = Some(Instant::now());
            }
            match source.part(layer) {
                PartState::Ready(part) => {
                    self.rest(layer, &part, source.tokens().len() - self.seam).await?;
                    layer += 1;
                }
                PartState::Failed(reason) => return Err(self.abort(reason.to_string()).await),
                PartState::Pending => match ahead.and_then(KvAhead::take) {
                    Some(range) => self.range(range).await?,
                    None => tokio::select! {
                        () = news.notified() => {}
                        () = offered(ahead) => {}
                    },
                },
            }
        }
        let Sent { parts, bytes, .. } = self.sent;
        let end = v1::TransferEnd { transfer: self.transfer, parts, bytes };
        self.tell(Message::End(end)).await
    }

    async fn abort(&self, reason: String) -> Stopped {
        let abort = v1::TransferAbort { transfer: self.transfer, reason: reason.clone() };
        _ = self.tell(Message::Abort(abort)).await;
        Stopped::Source(reason)
    }

    /// K and V of some tokens of a layer that is not final.
    async fn range(&mut self, range: KvRange<B>) -> Result<(), Stopped> {
        let KvRange { layer, tokens, kv } = range;
        let before = self.sent_tokens[layer].last().map_or(0, |sent| sent.end);
        debug_assert!(before <= tokens.start, "layer {layer}: {tokens:?} behind tokens up to {before}");
        self.sent_tokens[layer].push(tokens.clone());
        self.kv(layer, tokens.clone(), &kv, tokens.start).await
    }

    /// What has not been sent of a part that is final.
    async fn rest(&mut self, layer: usize, part: &LayerPart<B>, body: usize) -> Result<(), Stopped> {
        match part {
            LayerPart::Recurrent(_) => {
                let encoded = encode(&part_to_host(&self.shared.backend, part));
                self.part(layer, LayerKind::Recurrent, 0..body, encoded).await
            }
            LayerPart::Attention(kv) => {
                for tokens in gaps(&std::mem::take(&mut self.sent_tokens[layer]), body) {
                    self.kv(layer, tokens, kv, 0).await?;
                }
                Ok(())
            }
        }
    }

    /// K and V of `tokens` of the body, in ranges of bounded size. Row 0 of `kv` is the token `first`.
    async fn kv(&mut self, layer: usize, tokens: Range<usize>, kv: &B::Kv, first: usize) -> Result<(), Stopped> {
        let Shared { backend, config, .. } = self.shared;
        let (rows, shape) = (backend.kv_len(kv), backend.kv_shape(kv));
        let row_bytes = (shape.heads * (shape.d_k + shape.d_v) * shape.dtype.size()).max(1);
        let step = (config.range_bytes / row_bytes).max(1);
        for from in tokens.clone().step_by(step) {
            let tokens = from..tokens.end.min(from + step);
            let chosen = tokens.start - first..tokens.end - first;
            let host = if chosen == (0..rows) {
                backend.kv_download(kv)
            } else {
                backend.kv_download(&backend.kv_copy(kv, chosen))
            };
            let encoded = encode(&LayerPart::Attention(host));
            self.part(layer, LayerKind::Attention, tokens, encoded).await?;
        }
        Ok(())
    }

    /// One encoded part, which covers `tokens` of the body, in chunks.
    async fn part(
        &mut self,
        layer: usize,
        kind: LayerKind,
        tokens: Range<usize>,
        encoded: Bytes,
    ) -> Result<(), Stopped> {
        let part_bytes = encoded.len() as u64;
        let chunk_bytes = self.shared.config.chunk_bytes.max(1);
        for at in (0..encoded.len()).step_by(chunk_bytes) {
            let data = encoded.slice(at..encoded.len().min(at + chunk_bytes));
            let chunk = v1::PartChunk {
                transfer: self.transfer,
                key: self.key.clone(),
                layer: layer as u32,
                kind: wire_kind(kind) as i32,
                token_begin: (self.seam + tokens.start) as u32,
                token_end: (self.seam + tokens.end) as u32,
                offset: at as u64,
                part_bytes,
                crc32c: crc32c::crc32c(&data),
                data,
            };
            self.tell(Message::Chunk(chunk)).await?;
        }
        self.sent.parts += 1;
        self.sent.bytes += part_bytes;
        if self.sent.all_ready.is_none() {
            self.sent.hidden_bytes += part_bytes;
        }
        Ok(())
    }

    async fn tell(&self, message: Message) -> Result<(), Stopped> {
        tell(&self.messages, message).await
    }
}

async fn tell(messages: &mpsc::Sender<v1::TransferMessage>, message: Message) -> Result<(), Stopped> {
    messages.send(v1::TransferMessage { message: Some(message) }).await.map_err(|_| Stopped::Closed)
}

/// Resolves when there is something to be sent ahead.
async fn offered<B: Backend>(ahead: Option<&KvAhead<B>>) {
    match ahead {
        Some(ahead) => ahead.offered().await,
        None => std::future::pending().await,
    }
}

/// The tokens of `0..body` that are in none of `sent`, which ascend and are disjoint.
fn gaps(sent: &[Range<usize>], body: usize) -> Vec<Range<usize>> {
    let ends = std::iter::once(0).chain(sent.iter().map(|range| range.end));
    let starts = sent.iter().map(|range| range.start).chain(std::iter::once(body));
    ends.zip(starts).map(|(from, to)| from..to).filter(|range| !range.is_empty()).collect()
}

fn refusal(status: &Status) -> DeliveryError {
    let message = status.message().to_string();
    match status.code() {
        Code::FailedPrecondition | Code::NotFound | Code::Cancelled => DeliveryError::Unwanted(message),
        _ => DeliveryError::Failed(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_was_not_sent() {
        let ranges = |of: &[(usize, usize)]| of.iter().map(|&(from, to)| from..to).collect::<Vec<_>>();
        for (sent, missing) in [
            (&[][..], &[(0, 10)][..]),
            (&[(0, 4), (4, 6)], &[(6, 10)]),
            (&[(2, 4), (6, 8)], &[(0, 2), (4, 6), (8, 10)]),
            (&[(4, 10)], &[(0, 4)]),
            (&[(0, 10)], &[]),
        ] {
            assert_eq!(gaps(&ranges(sent), 10), ranges(missing), "{sent:?}");
        }
    }
}
