//! Trace context across processes, as W3C `traceparent`.
//!
//! Owns the reading and writing of the context in headers and metadata. What can go wrong: a malformed context, which
//! is ignored so that the span begins a trace of its own.

use http::HeaderMap;
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::{Ascii, MetadataKey, MetadataMap};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

const TRACEPARENT: &str = "traceparent";

struct Headers<'a>(&'a HeaderMap);
impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }
    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|key| key.as_str()).collect()
    }
}

struct Metadata<'a>(&'a MetadataMap);
impl Extractor for Metadata<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }
    fn keys(&self) -> Vec<&str> {
        Vec::new()
    }
}

struct MetadataMut<'a>(&'a mut MetadataMap);
impl Injector for MetadataMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        // The propagator writes valid names and values, and an empty `tracestate`, which is not worth a header.
        if value.is_empty() {
            return;
        }
        if let (Ok(key), Ok(value)) = (key.parse::<MetadataKey<Ascii>>(), value.parse()) {
            self.0.insert(key, value);
        }
    }
}

struct Text<'a>(&'a str);
impl Extractor for Text<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        (key == TRACEPARENT).then_some(self.0)
    }
    fn keys(&self) -> Vec<&str> {
        vec![TRACEPARENT]
    }
}

struct Traceparent(Option<String>);
impl Injector for Traceparent {
    fn set(&mut self, key: &str, value: String) {
        if key == TRACEPARENT {
            self.0 = Some(value);
        }
    }
}

fn read(carrier: &dyn Extractor) -> Context {
    // Not the current context: a request without a trace must not join the one of whoever runs this.
    TraceContextPropagator::new().extract_with_context(&Context::new(), carrier)
}

fn set_parent(span: &Span, parent: Context) {
    if parent.span().span_context().is_valid() {
        // Fails only where spans are not traced, and then there is nothing to join.
        let _ = span.set_parent(parent);
    }
}

/// The context that HTTP headers carry; empty if none or malformed.
pub fn extract(headers: &HeaderMap) -> Context {
    read(&Headers(headers))
}

/// The context that gRPC metadata carries; empty if none or malformed.
pub fn extract_metadata(metadata: &MetadataMap) -> Context {
    read(&Metadata(metadata))
}

/// Writes the current span's context into gRPC metadata; nothing if there is none.
pub fn inject_current(metadata: &mut MetadataMap) {
    TraceContextPropagator::new().inject_context(&Span::current().context(), &mut MetadataMut(metadata));
}

/// Makes `span`, which must not have been entered, a child of the context in HTTP headers.
pub fn adopt(span: &Span, headers: &HeaderMap) {
    set_parent(span, extract(headers));
}

/// Makes `span`, which must not have been entered, a child of the context in gRPC metadata.
pub fn adopt_metadata(span: &Span, metadata: &MetadataMap) {
    set_parent(span, extract_metadata(metadata));
}

/// Makes `span`, which must not have been entered, a child of a `traceparent`.
pub fn adopt_text(span: &Span, traceparent: &str) {
    set_parent(span, read(&Text(traceparent)));
}

/// The current span's `traceparent`; none if spans are not traced.
pub fn traceparent() -> Option<String> {
    let mut text = Traceparent(None);
    TraceContextPropagator::new().inject_context(&Span::current().context(), &mut text);
    text.0
}
