//! Events of pods, as `kubectl describe pod` shows them, for what has no other way to a pod's owner. An event is news:
//! it is told once, and what could not be told within the hour, for which a cluster keeps events, stays in log and
//! metrics. Each event has a name made of what it says, so that a new process finds that it was told already; a
//! container that goes on restarting raises its event's count.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash, Hasher},
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context;
use k8s_openapi::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use ledger::ShareRecord;
use serde_json::json;
use tracing::{debug, warn};

use super::{
    Access, connection,
    failures::{Failures, in_words},
};

/// Who says it.
const COMPONENT: &str = "vcuda-device-plugin";

/// Reason of an event about a container that runs in spite of its image.
const IMAGE_WARNING: &str = "GpuShareImageWarning";

/// How long a cluster keeps events (kube-apiserver, `--event-ttl`).
const NEWS: Duration = Duration::from_secs(60 * 60);

/// Least time between two changes of one event.
const EACH: Duration = Duration::from_secs(60);

/// Events that are written at one look; the others wait for the next one.
const AT_ONCE: usize = 10;

/// Longest text of an event (API of events.k8s.io, `note`), in bytes.
const MAX_MESSAGE: usize = 1024;

/// Longest part of a pod's name in the name of its event, which may have 253 characters in all.
const MAX_POD_NAME: usize = 230;

/// Something to be told about a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    namespace: String,
    pod: String,
    /// As kubelet knows it; kubectl knows a static pod's too.
    uid: String,
    name: String,
    /// One start of the container.
    start: String,
    message: String,
    at: SystemTime,
}

impl Said {
    /// That the container of `record` was started at `at` in spite of what `sentence` says of its image.
    pub(crate) fn image_warning(record: &ShareRecord, sentence: &str, at: SystemTime) -> Self {
        let (pod, container) = (&record.pod, &record.container);
        let mut message = format!(
            "container {} was started by this node's policy for images, warn: {sentence}",
            container.name
        );
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        let mut hasher = DefaultHasher::new();
        (&pod.uid, &message).hash(&mut hasher);
        let part: String = pod.name.chars().take(MAX_POD_NAME).collect();
        let name = format!("{}.{:016x}", part.trim_end_matches(['.', '-']), hasher.finish());
        Self {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            uid: pod.uid.clone(),
            name,
            start: container.id.clone(),
            message,
            at,
        }
    }

    fn key(&self) -> Key {
        (self.namespace.clone(), self.name.clone())
    }

    fn event(&self, node: &str) -> Event {
        let at = time_of(self.at);
        Event {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            involved_object: ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                namespace: Some(self.namespace.clone()),
                name: Some(self.pod.clone()),
                uid: Some(self.uid.clone()),
                ..ObjectReference::default()
            },
            type_: Some("Warning".into()),
            reason: Some(IMAGE_WARNING.into()),
            message: Some(self.message.clone()),
            count: Some(1),
            first_timestamp: at.clone(),
            last_timestamp: at,
            source: Some(EventSource { component: Some(COMPONENT.into()), host: Some(node.into()) }),
            reporting_component: Some(COMPONENT.into()),
            reporting_instance: Some(node.into()),
            ..Event::default()
        }
    }
}

/// Namespace and name of an event.
type Key = (String, String);

/// An event that was told.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    start: String,
    /// How often, as the API server has it; none where it wants no such event.
    count: Option<i32>,
    at: Instant,
}

/// What was told, and so what is still to be told.
#[derive(Debug, Default)]
struct Book(BTreeMap<Key, Told>);

impl Book {
    /// What is to be told now of all that is `said`. What nobody says any more is forgotten.
    fn due<'a>(&mut self, said: &'a [Said], now: (Instant, SystemTime)) -> Vec<&'a Said> {
        let keys: BTreeSet<Key> = said.iter().map(Said::key).collect();
        self.0.retain(|key, _| keys.contains(key));
        let is_due = |said: &&Said| {
            // What is yet to come is from a clock that was set back since: nobody knows how old it is, so it is told.
            let news = now.1.duration_since(said.at).map_or(true, |age| age < NEWS);
            news && self.0.get(&said.key()).is_none_or(|told| {
                told.start != said.start && told.count.is_some() && now.0.duration_since(told.at) >= EACH
            })
        };
        said.iter().filter(is_due).take(AT_ONCE).collect()
    }

    fn note(&mut self, said: &Said, count: Option<i32>, now: Instant) {
        self.0.insert(said.key(), Told { start: said.start.clone(), count, at: now });
    }
}

/// Tells events to the API server, where there is a way to it.
pub(crate) struct Events {
    access: Access,
    connection: Option<(Client, String)>,
    book: Book,
    failures: Failures,
    not_before: Option<Instant>,
}

impl Events {
    pub(crate) fn new(access: Access) -> Self {
        Self { access, connection: None, book: Book::default(), failures: Failures::none(), not_before: None }
    }

    /// Tells what is new in all that is `said`; what cannot be told now is told when this is called again.
    pub(crate) async fn tell(&mut self, said: &[Said]) {
        let now = Instant::now();
        let due = self.book.due(said, (now, SystemTime::now()));
        if due.is_empty() || self.not_before.is_some_and(|at| now < at) {
            return;
        }
        match self.write(&due).await {
            Ok(()) => (self.failures, self.not_before) = (Failures::none(), None),
            Err(error) => {
                self.fail(&in_words(&error));
                self.connection = None;
                self.not_before = Some(Instant::now() + self.failures.pause());
            }
        }
    }

    fn fail(&mut self, reason: &str) {
        if self.failures.is_news(reason) {
            warn!(%reason, "an event of a pod cannot be written");
        } else {
            debug!(%reason, "an event of a pod cannot be written");
        }
    }

    async fn write(&mut self, due: &[&Said]) -> anyhow::Result<()> {
        if self.connection.is_none() {
            self.connection = connection::open(&self.access).await?;
        }
        // Without a way to the API server that has been said already, and log and metrics must do.
        let Some((client, node)) = self.connection.clone() else { return Ok(()) };
        for said in due {
            let api = Api::namespaced(client.clone(), &said.namespace);
            let known = self.book.0.get(&said.key()).and_then(|told| told.count);
            match connection::answer(write(&api, said, &node, known)).await? {
                Ok(count) => self.book.note(said, count, Instant::now()),
                // Not this one: the namespace is going, or this process may not. All the same for the next try.
                Err(kube::Error::Api(status)) if matches!(status.code, 400 | 403 | 404 | 422) => {
                    self.book.note(said, None, Instant::now());
                    let rights = "see the access rules in config/deploy/daemonset.yaml";
                    self.fail(&format!(
                        "namespace {}: {}{}",
                        said.namespace,
                        status.message,
                        if status.code == 403 { format!("; {rights}") } else { String::new() }
                    ));
                }
                Err(error) => {
                    return Err(error).with_context(|| format!("pod {}/{}", said.namespace, said.pod));
                }
            }
        }
        Ok(())
    }
}

/// Writes an event, or raises its count from `known`; returns what the count is now.
async fn write(api: &Api<Event>, said: &Said, node: &str, known: Option<i32>) -> kube::Result<Option<i32>> {
    let is = |error: &kube::Error, code| matches!(error, kube::Error::Api(status) if status.code == code);
    let raised = |count: Option<i32>| {
        let mut change = json!({ "lastTimestamp": time_of(said.at) });
        if let Some(count) = count {
            change["count"] = count.saturating_add(1).into();
        }
        async move {
            let written = api.patch(&said.name, &PatchParams::default(), &Patch::Merge(&change)).await?;
            Ok(Some(written.count.unwrap_or(1)))
        }
    };
    if known.is_some() {
        match raised(known).await {
            Err(error) if is(&error, 404) => {}
            outcome => return outcome,
        }
    }
    match api.create(&PostParams::default(), &said.event(node)).await {
        // A process before this one has told it; for this start, as far as anybody knows. To write its time once more
        // changes nothing then, and tells how often it was.
        Err(error) if is(&error, 409) => raised(None).await,
        outcome => outcome.map(|_| Some(1)),
    }
}

/// Times before 1970 or past year 9999 are none.
fn time_of(at: SystemTime) -> Option<Time> {
    Timestamp::try_from(at).ok().map(Time)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(1_700_000_000);

    fn said(pod: &str, start: &str) -> Said {
        let record = serde_json::from_value(json!({
            "version": 1, "bootId": "b", "kind": "share", "state": "running", "boundAt": 1, "shim": true,
            "gpus": [{"uuid": "GPU-01010101-0101-0101-0101-010101010101", "minor": 0, "core": 20, "memoryBytes": 1 << 30}],
            "pod": {"uid": format!("uid-{pod}"), "namespace": "team", "name": pod, "sandboxId": "5a"},
            "container": {"name": "main", "id": start},
        }));
        Said::image_warning(&record.unwrap(), "it is musl", SystemTime::UNIX_EPOCH + START)
    }

    fn names(due: &[&Said]) -> Vec<String> {
        due.iter().map(|said| format!("{} {}", said.pod, said.start)).collect()
    }

    #[test]
    fn each_event_is_told_once_and_a_restart_raises_it_at_most_once_a_minute() {
        let (mut book, start) = (Book::default(), Instant::now());
        let now = |seconds: u64| {
            let after = Duration::from_secs(seconds);
            (start + after, SystemTime::UNIX_EPOCH + START + after)
        };
        let both = [said("a", "1"), said("b", "1")];
        assert_eq!(names(&book.due(&both, now(0))), ["a 1", "b 1"]);
        book.note(&both[0], Some(1), start);
        assert_eq!(names(&book.due(&both, now(1))), ["b 1"], "what failed is told at the next look");
        book.note(&both[1], Some(1), start);
        let restarted = [said("a", "2"), both[1].clone()];
        assert!(book.due(&restarted, now(59)).is_empty());
        assert_eq!(names(&book.due(&restarted, now(60))), ["a 2"]);
        // A pod of that name may come again; nothing is kept of those that are gone.
        assert!(book.due(&[], now(61)).is_empty());
        assert!(book.0.is_empty());
    }

    #[test]
    fn what_is_old_is_no_news_and_what_is_refused_is_not_tried_again() {
        let mut book = Book::default();
        let at = SystemTime::UNIX_EPOCH + START;
        let one = [said("a", "1")];
        assert!(book.due(&one, (Instant::now(), at + NEWS)).is_empty());
        let start = Instant::now();
        // The clock was set back by a day: it is told all the same, and once.
        let (back, forth) = (at - Duration::from_secs(86_400), at + Duration::from_secs(86_400));
        assert_eq!(names(&book.due(&one, (start, back))), ["a 1"]);
        book.note(&one[0], Some(1), start);
        assert!(book.due(&one, (start + EACH * 2, back)).is_empty());
        assert!(book.due(&one, (start + EACH * 2, forth)).is_empty());
        book.note(&one[0], None, start);
        assert!(book.due(&[said("a", "2")], (start + EACH * 2, at)).is_empty());
    }

    #[test]
    fn a_node_full_of_warnings_tells_them_a_few_at_a_time() {
        let (mut book, start) = (Book::default(), Instant::now());
        let all: Vec<_> = (0..25).map(|n| said(&format!("p{n}"), "1")).collect();
        let mut rounds = Vec::new();
        loop {
            let due: Vec<Said> =
                book.due(&all, (start, SystemTime::UNIX_EPOCH + START)).into_iter().cloned().collect();
            if due.is_empty() {
                break;
            }
            due.iter().for_each(|said| book.note(said, Some(1), start));
            rounds.push(due.len());
        }
        assert_eq!(rounds, [10, 10, 5]);
    }

    #[test]
    fn an_events_name_and_text_are_within_what_the_api_takes_and_stay_the_same() {
        let long = said(&"x".repeat(253), "1");
        assert!(long.name.len() <= 253, "{}", long.name.len());
        assert_eq!(said("a", "1").name, said("a", "2").name);
        assert_ne!(said("a", "1").name, said("b", "1").name);
        let event = said("a", "1").event("node");
        assert_eq!(event.first_timestamp.unwrap().0.as_second(), 1_700_000_000);
        let mut record: ShareRecord = serde_json::from_value(json!({
            "version": 1, "bootId": "b", "kind": "share", "state": "running", "boundAt": 1, "shim": true, "gpus": [],
            "pod": {"uid": "u", "namespace": "team", "name": "a", "sandboxId": "5a"},
            "container": {"name": "main", "id": "1"},
        }))
        .unwrap();
        record.container.name = "m".into();
        let said = Said::image_warning(&record, &"ü".repeat(2_000), SystemTime::UNIX_EPOCH);
        assert!(said.message.len() <= MAX_MESSAGE && said.message.len() > MAX_MESSAGE - 2);
    }
}
