//! What tests put between workers and combiners: a tap that tells and cuts what passes, and a hold that stops a worker in
//! the middle of a segment. Order is observed with them, never time.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use hypic_cache::Source;
use hypic_kernels::Cpu;
use hypic_proto::v1;
use hypic_proto::v1::combine_client::CombineClient;
use hypic_proto::v1::combine_server::{Combine, CombineServer};
use hypic_proto::v1::transfer_message::Message;
use hypic_transport::{Delivered, DeliveryError, KvAhead, Parcel, Transport};
use parking_lot::{Condvar, Mutex};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

/// Longest time that a test waits for what must come.
const PATIENCE: Duration = Duration::from_secs(20);

/// A part that has passed whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    /// Key of its entry.
    pub key: [u8; 32],
    /// Attempt at the transfer.
    pub generation: u32,
    /// Index of the layer.
    pub layer: usize,
    /// Whether it is K and V.
    pub attention: bool,
    /// Tokens of the segment that it covers.
    pub tokens: Range<usize>,
    /// Encoded bytes.
    pub bytes: u64,
}

/// Stands in front of one combiner for its workers.
#[derive(Clone)]
pub struct Tap {
    to: Channel,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    seen: Mutex<Seen>,
    news: Notify,
}

#[derive(Default)]
struct Seen {
    passed: Vec<Passed>,
    cuts_left: usize,
    cuts: usize,
}

impl Tap {
    /// A tap in front of `to`, and the connection to it.
    pub async fn start(to: Channel) -> (Self, Channel) {
        let tap = Tap { to, shared: Arc::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let server = Server::builder().add_service(CombineServer::new(tap.clone()));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        (tap, Endpoint::from_shared(format!("http://{address}")).expect("a good address").connect_lazy())
    }

    /// The next transfer breaks off behind its first K and V.
    pub fn cut_next(&self) {
        self.shared.seen.lock().cuts_left += 1;
    }

    /// Transfers that were cut.
    pub fn cuts(&self) -> usize {
        self.shared.seen.lock().cuts
    }

    /// What has passed of the entry `key`, in order.
    pub fn passed(&self, key: &[u8; 32]) -> Vec<Passed> {
        self.shared.seen.lock().passed.iter().filter(|p| p.key == *key).cloned().collect()
    }

    /// Per attention layer, the ranges of tokens that have passed of the entry `key`, in order.
    pub fn ranges(&self, key: &[u8; 32]) -> BTreeMap<usize, Vec<Range<usize>>> {
        let mut ranges: BTreeMap<usize, Vec<Range<usize>>> = BTreeMap::new();
        for part in self.passed(key).into_iter().filter(|p| p.attention) {
            ranges.entry(part.layer).or_default().push(part.tokens);
        }
        ranges
    }

    /// Resolves when `condition` holds, which is looked at whenever a part has passed or a transfer was cut.
    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let holds = async {
            loop {
                let news = self.shared.news.notified();
                let mut news = std::pin::pin!(news);
                news.as_mut().enable();
                if condition(self) {
                    return;
                }
                news.await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, holds).await;
        assert!(waited.is_ok(), "{what}: {:?}", self.shared.seen.lock().passed);
    }

    /// Hand on what comes, until it ends, is cut, or nobody wants it.
    async fn pass(self, mut from: Streaming<v1::TransferMessage>, to: mpsc::Sender<v1::TransferMessage>) {
        let mut generation = 0;
        while let Ok(Some(message)) = from.message().await {
            if let Some(Message::Header(header)) = &message.message {
                generation = header.transfer.as_ref().map_or(0, |transfer| transfer.generation);
            }
            let cut = self.note(generation, &message);
            if to.send(message).await.is_err() || cut {
                return;
            }
        }
    }

    /// Take note of what passes; true if nothing more may.
    fn note(&self, generation: u32, message: &v1::TransferMessage) -> bool {
        let Some(Message::Chunk(chunk)) = &message.message else { return false };
        if chunk.offset + (chunk.data.len() as u64) < chunk.part_bytes {
            return false;
        }
        let attention = chunk.kind == v1::PartKind::Attention as i32;
        let mut seen = self.shared.seen.lock();
        seen.passed.push(Passed {
            key: chunk.key[..].try_into().expect("a key"),
            generation,
            layer: chunk.layer as usize,
            attention,
            tokens: chunk.token_begin as usize..chunk.token_end as usize,
            bytes: chunk.part_bytes,
        });
        let cut = attention && seen.cuts_left > 0;
        if cut {
            seen.cuts_left -= 1;
            seen.cuts += 1;
        }
        drop(seen);
        self.shared.news.notify_waiters();
        cut
    }
}

#[tonic::async_trait]
impl Combine for Tap {
    type GenerateStream = BoxStream<'static, Result<v1::CombineEvent, Status>>;

    async fn generate(
        &self,
        _: Request<v1::CombineRequest>,
    ) -> Result<Response<BoxStream<'static, Result<v1::CombineEvent, Status>>>, Status> {
        Err(Status::unimplemented("workers generate nothing"))
    }

    async fn cancel_choice(
        &self,
        _: Request<v1::CancelChoiceRequest>,
    ) -> Result<Response<v1::CancelChoiceResponse>, Status> {
        Err(Status::unimplemented("workers cancel no choice"))
    }

    async fn receive(
        &self,
        request: Request<Streaming<v1::TransferMessage>>,
    ) -> Result<Response<v1::ReceiveResponse>, Status> {
        let (passed, messages) = mpsc::channel(1);
        let passing = tokio::spawn(self.clone().pass(request.into_inner(), passed));
        let _passing = AbortOnDropHandle::new(passing);
        CombineClient::new(self.to.clone()).receive(ReceiverStream::new(messages)).await
    }
}

/// Stops the first worker that has a part ready, which is in its last pass through a segment then and behind the first
/// layer, until the test lets it go on.
#[derive(Default)]
pub struct Hold {
    state: Mutex<HoldState>,
    reached: Notify,
    opened: Condvar,
}

#[derive(Default)]
struct HoldState {
    used: bool,
    open: bool,
}

impl Hold {
    /// Resolves when a worker is held.
    pub async fn reached(&self) {
        let waited = tokio::time::timeout(PATIENCE, self.reached.notified()).await;
        waited.expect("a worker comes to its last pass");
    }

    /// The worker goes on; none is held any more.
    pub fn open(&self) {
        self.state.lock().open = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.used, true) {
            return;
        }
        self.reached.notify_one();
        while !state.open {
            let waited = self.opened.wait_for(&mut state, PATIENCE);
            assert!(!waited.timed_out(), "the test lets the worker go on");
        }
    }
}

/// A transport whose senders' worker may be held.
pub struct Held<T> {
    /// What sends.
    pub inner: T,
    /// Where workers are held.
    pub hold: Arc<Hold>,
}

impl<T: Transport<Cpu>> Transport<Cpu> for Held<T> {
    fn ahead(&self) -> Option<KvAhead<Cpu>> {
        self.inner.ahead()
    }

    fn deliver(&self, parcel: Parcel<Cpu>) -> BoxFuture<'static, Result<Delivered, DeliveryError>> {
        if let Source::Flight(flight) = &parcel.source {
            let hold = self.hold.clone();
            flight.subscribe(Arc::new(move || hold.pass()));
        }
        self.inner.deliver(parcel)
    }
}
