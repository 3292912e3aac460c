//! The receiving end of the transport between processes: a transfer becomes a computation that others can follow.
//!
//! What arrives is checked (version, model, key; by [`Assembly`] every part) before a composition sees it: a layer as soon as
//! all ranges of it are there. It is kept as an entry when it is whole. A stream that breaks off, lies or says that it failed fails its flight at once;
//! the next attempt, or another request for the same entry, takes it from there.

use std::time::Duration;

use hypic_cache::{Claim, Lead, Source, Store};
use hypic_kernels::{Backend, part_from_host};
use hypic_proto::v1;
use hypic_proto::v1::transfer_message::Message;
use hypic_state::{EntryLayout, Stored};
use tokio::time::timeout;
use tonic::{Status, Streaming};

use super::assembly::Assembly;
use super::{GrpcConfig, Identity, Served, convert};
use crate::{Exchange, Refused, TransferId};

/// Takes in entries for one combiner.
pub struct Receiver<B: Backend, P: Stored> {
    config: GrpcConfig,
    backend: B,
    layout: EntryLayout,
    served: Served,
    store: Store<B, P>,
    exchange: Exchange<B>,
}

impl<B: Backend, P: Stored> Receiver<B, P> {
    /// Entries of `layout` arrive on `backend`, are kept in `store` and handed out by `exchange`.
    pub fn new(
        config: GrpcConfig,
        backend: B,
        layout: EntryLayout,
        served: Served,
        store: Store<B, P>,
        exchange: Exchange<B>,
    ) -> Self {
        Receiver { config, backend, layout, served, store, exchange }
    }

    /// See one transfer through; whether what was sent was used.
    pub(super) async fn receive(&self, mut stream: Streaming<v1::TransferMessage>) -> Result<bool, Status> {
        let Some(v1::TransferMessage { message: Some(Message::Header(header)) }) = stream.message().await? else {
            return Err(convert::invalid("a transfer begins with its header"));
        };
        let (transfer, identity) = self.check(header)?;
        let wait = self.config.open_wait;
        let opened = timeout(wait, self.exchange.opened(transfer)).await;
        opened.map_err(|_| refused(Refused::NotOpen))?.map_err(refused)?;
        loop {
            match self.store.claim(identity.key, &identity.tokens, identity.seam) {
                Claim::Hit(entry) => {
                    self.exchange.send(transfer, Source::Entry(entry)).map_err(refused)?;
                    return Ok(false);
                }
                // A later attempt is made because an earlier one, which may be this flight, does not get on.
                Claim::Join(flight) if transfer.generation == 0 => {
                    self.exchange.send(transfer, Source::Flight(flight.clone())).map_err(refused)?;
                    if flight.landed().await.is_ok() {
                        return Ok(false);
                    }
                }
                Claim::Join(_) => {
                    let lead = self.store.lead_alone(identity.key, &identity.tokens, identity.seam);
                    return self.take(transfer, &identity, lead, stream).await;
                }
                Claim::Lead(lead) => return self.take(transfer, &identity, lead, stream).await,
            }
        }
    }

    fn check(&self, header: v1::TransferHeader) -> Result<(TransferId, Identity), Status> {
        let (ours, theirs) = (u32::from(self.served.space.format), header.format_version);
        if ours != theirs {
            return Err(convert::invalid(format!("format_version: {theirs}, this combiner knows {ours}")));
        }
        if header.model_fingerprint[..] != self.served.space.fingerprint.0 {
            return Err(convert::invalid("model_fingerprint: an entry of another model"));
        }
        if header.layers as usize != self.layout.len() {
            let (theirs, ours) = (header.layers, self.layout.len());
            return Err(convert::invalid(format!("layers: {theirs}, this model has {ours}")));
        }
        Ok((convert::transfer_id(header.transfer)?, self.served.identity(header.entry)?))
    }

    async fn take(
        &self,
        transfer: TransferId,
        identity: &Identity,
        lead: Lead<B>,
        stream: Streaming<v1::TransferMessage>,
    ) -> Result<bool, Status> {
        if let Err(why) = self.exchange.send(transfer, Source::Flight(lead.flight().clone())) {
            lead.fail(why.to_string());
            return Err(refused(why));
        }
        let begun = std::time::Instant::now();
        match self.parts(identity, &lead, stream).await {
            Ok(()) => {
                let cost = cost(begun.elapsed());
                lead.complete(&self.layout, cost).map_err(|e| Status::data_loss(e.to_string()))?;
                Ok(true)
            }
            Err(status) => {
                lead.fail(status.message());
                Err(status)
            }
        }
    }

    async fn parts(
        &self,
        identity: &Identity,
        lead: &Lead<B>,
        mut stream: Streaming<v1::TransferMessage>,
    ) -> Result<(), Status> {
        let body = identity.seam..identity.tokens.len();
        let mut assembly = Assembly::new(identity.key, self.layout.clone(), body, self.config.part_limit);
        loop {
            let Some(v1::TransferMessage { message }) = stream.message().await? else {
                return Err(assembly.broken_off());
            };
            match message {
                Some(Message::Chunk(chunk)) => {
                    if let Some((layer, part)) = assembly.take(chunk)? {
                        lead.publish(layer, part_from_host(&self.backend, &part));
                    }
                }
                Some(Message::End(_)) => return assembly.finish(),
                Some(Message::Abort(abort)) => return Err(Status::aborted(abort.reason)),
                Some(Message::Header(_)) => return Err(convert::invalid("a second header")),
                // Of a kind that this version does not know.
                None => {}
            }
        }
    }
}

/// What having an entry is worth: the time that its arrival took, which is about what its absence would cost.
fn cost(arrival: Duration) -> Duration {
    arrival.max(Duration::from_micros(1))
}

fn refused(why: Refused) -> Status {
    match why {
        Refused::NotOpen => Status::not_found(why.to_string()),
        Refused::Closed | Refused::Superseded => Status::failed_precondition(why.to_string()),
    }
}
