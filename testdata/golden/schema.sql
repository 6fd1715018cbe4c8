CREATE TABLE task_audit (
	task_id integer not null, -- 0: the queue as a whole
	seq     integer not null, -- 1, 2, 3 … for each task
	event   text    not null, -- what happened: picked, processing, success …
	at      integer not null, -- Unix ms
	attempt integer, -- the execution that it belongs to
	owner   text, -- the poller that picked the task
	actor   text, -- who did it by hand; null: the queue
	reason  text, -- why it was done by hand
	detail  text, -- JSON: error, class, cause, stack, timings
	primary key (task_id, seq)
) strict, without rowid;

CREATE TABLE task_dedupe (
	kind       text    not null, -- key, step, once, duplicate
	task_id    integer not null, -- the task of a step, the holder of a duplicate's key; 0: none
	name       text    not null, -- the key, or the name of the step
	state      text    not null check (state in ('processing', 'done', 'failed', 'skipped')),
	by_task    integer not null, -- the task that wrote the record
	attempt    integer, -- its attempt
	seq        integer, -- of a step: 1, 2, 3 … in the order in which the task's steps first began
	hits       integer not null default 1, -- of a duplicate: how often it was enqueued
	created_at integer not null, -- Unix ms
	updated_at integer not null, -- Unix ms
	expires_at integer, -- the key is free again from here, Unix ms; null: never
	error      text, -- why it failed
	result     text check (result is null or json_valid(result)), -- what the step returned, or its stand-in
	primary key (kind, task_id, name)
) strict, without rowid;

CREATE TABLE task_error (
	fingerprint    text    primary key, -- a short hash
	event_type     text    not null,
	class          text    not null, -- retryable, permanent, unclassified, lost
	message        text    not null, -- the text without what differs between tasks
	sample_task    integer not null, -- the last task that failed so
	first_seen     integer not null, -- Unix ms
	last_seen      integer not null, -- Unix ms
	total          integer not null, -- failures
	resolved_at    integer, -- Unix ms
	resolved_by    text,
	resolved_as    text,
	resolved_total integer -- total when it was resolved: where it has grown since, the group has come back
) strict, without rowid;

CREATE TABLE task_error_count (
	fingerprint text    not null,
	span        integer not null, -- minutes: 1 or 60
	at          integer not null, -- begin of the span, Unix minutes
	n           integer not null,
	primary key (fingerprint, span, at)
) strict, without rowid;

CREATE TABLE task_meta (
	key   text primary key, -- schema_version, poller:<owner>, …
	value text not null
) strict, without rowid;

CREATE TABLE task_outbox (
	id            integer primary key autoincrement, -- never used twice
	event_type    text    not null -- names the handler
	                      check (length(event_type) between 1 and 200),
	status        text    not null default 'pending'
	                      check (status = 'picked' or status = 'success' or status = 'pending'
	                          or status = 'processing' or status = 'retry_wait' or status = 'scheduled'
	                          or status = 'dead_letter' or status = 'skipped' or status = 'cancelled'),
	retry_count   integer not null default 0, -- retries that have been scheduled
	next_run_at   integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), -- due at, Unix ms
	created_at    integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), -- Unix ms
	updated_at    integer not null default (cast(round((julianday('now') - 2440587.5) * 86400000) as integer)), -- last change, Unix ms
	priority      integer not null default 0, -- the higher, the sooner, among tasks of one type
	dedupe_key    text    check (length(dedupe_key) between 1 and 500), -- one live task per key
	group_key     text    check (length(group_key) between 1 and 500), -- one at a time, in order of id
	trace_id      text    not null default (lower(hex(randomblob(16)))),
	max_attempts  integer check (max_attempts > 0), -- null: what the type or the queue says
	expires_at    integer, -- not started later than this, Unix ms; null: never too late
	parent_id     integer, -- the task whose handler enqueued this one
	attempt       integer not null default 0, -- executions begun, less those given back
	fence         integer not null default 0, -- claims, never given back; each write of an attempt carries it
	version       integer not null default 0, -- seq of the last audit row
	lost_count    integer not null default 0, -- executions that ended with their process
	blocked       integer not null default 0, -- 1: waits behind its group's first task
	owner         text, -- the poller that holds the task, while picked or processing
	lease_until   integer, -- the hold ends unless it is renewed, Unix ms
	finished_at   integer, -- when it became success, dead_letter, skipped or cancelled, Unix ms
	last_error    text,
	-- The last column, so that reading the others of a large task doesn't read it.
	payload       text    not null check (json_valid(payload))
, run integer not null default 1, key_window integer check (key_window > 0 and key_window < 1000000000000000), resolved_as text, error_group text) strict;

CREATE TABLE task_stats (
	minute      integer not null, -- Unix minutes
	event_type  text    not null,
	picked      integer not null default 0, -- claims
	success     integer not null default 0,
	retried     integer not null default 0, -- failures that wait for a retry
	dead        integer not null default 0, -- failures that became dead letters
	lost        integer not null default 0, -- executions that ended with their process
	released    integer not null default 0, -- given back or put off, at no cost
	skipped     integer not null default 0,
	cancelled   integer not null default 0,
	wait_ms     integer not null default 0, -- sum over picked: from due to picked
	run_ms      integer not null default 0, -- sum over success, retried and dead: from start to end
	-- Counts by duration: above the bound before, up to this one, in ms.
	wait_1 integer not null default 0, wait_5 integer not null default 0, wait_10 integer not null default 0,
	wait_50 integer not null default 0, wait_100 integer not null default 0, wait_500 integer not null default 0,
	wait_1000 integer not null default 0, wait_5000 integer not null default 0, wait_30000 integer not null default 0,
	wait_120000 integer not null default 0, wait_600000 integer not null default 0, wait_inf integer not null default 0,
	run_1 integer not null default 0, run_5 integer not null default 0, run_10 integer not null default 0,
	run_50 integer not null default 0, run_100 integer not null default 0, run_500 integer not null default 0,
	run_1000 integer not null default 0, run_5000 integer not null default 0, run_30000 integer not null default 0,
	run_120000 integer not null default 0, run_600000 integer not null default 0, run_inf integer not null default 0,
	primary key (minute, event_type)
) strict, without rowid;

CREATE INDEX task_audit_manual on task_audit (at) where actor is not null;

CREATE INDEX task_blocked on task_outbox (event_type) where blocked = 1;

CREATE INDEX task_dead on task_outbox (event_type, resolved_as) where status = 'dead_letter' and resolved_as is null;

CREATE INDEX task_dead_group on task_outbox (error_group) where status = 'dead_letter' and resolved_as is null;

CREATE INDEX task_dedupe_expiry on task_dedupe (expires_at) where expires_at is not null;

CREATE INDEX task_dedupe_once on task_dedupe (by_task) where kind = 'once';

CREATE INDEX task_due on task_outbox (event_type, priority desc, next_run_at)
	where status = 'pending' and blocked = 0;

CREATE INDEX task_error_count_age on task_error_count (span, at);

CREATE INDEX task_error_seen on task_error (last_seen);

CREATE INDEX task_group on task_outbox (group_key) where group_key is not null and finished_at is null;

CREATE INDEX task_held on task_outbox (owner) where owner is not null;

CREATE UNIQUE INDEX task_key on task_outbox (dedupe_key) where dedupe_key is not null and finished_at is null;

CREATE INDEX task_retry on task_outbox (next_run_at) where status = 'retry_wait';

CREATE INDEX task_scheduled on task_outbox (next_run_at) where status = 'scheduled';

CREATE TRIGGER task_audit_no_delete before delete on task_audit
	when exists (select 1 from task_outbox where id = old.task_id)
begin
	select raise(abort, 'task_audit is append-only while its task exists');
end;

CREATE TRIGGER task_audit_no_update before update on task_audit
begin
	select raise(abort, 'task_audit is append-only');
end;

CREATE TRIGGER task_duplicate before insert on task_outbox
	when new.dedupe_key is not null
begin
	insert into task_dedupe (kind, task_id, name, state, by_task, created_at, updated_at, expires_at)
	select 'duplicate', holder, new.dedupe_key, 'skipped', holder, new.created_at, new.created_at, until
	from (
		select id as holder, null as until from task_outbox where dedupe_key = new.dedupe_key and finished_at is null
		union all
		select by_task, expires_at from task_dedupe
		where kind = 'key' and task_id = 0 and name = new.dedupe_key
			and (expires_at is null or expires_at > new.created_at)
		limit 1)
	where true
	on conflict (kind, task_id, name) do update set
		hits = hits + 1, updated_at = excluded.updated_at, expires_at = excluded.expires_at;
	select raise(ignore) where exists (
			select 1 from task_outbox where dedupe_key = new.dedupe_key and finished_at is null)
		or exists (
			select 1 from task_dedupe
			where kind = 'key' and task_id = 0 and name = new.dedupe_key
				and (expires_at is null or expires_at > new.created_at));
end;

CREATE VIEW task_trail as
select task_id, seq, event, strftime('%Y-%m-%dT%H:%M:%fZ', at / 1000.0, 'unixepoch') as time,
	attempt, owner, actor, reason, detail, at
from (
	select id as task_id, -1 as seq, 'created' as event, created_at as at,
		null as attempt, null as owner, null as actor, null as reason,
		json_object('type', event_type, 'trace_id', trace_id, 'parent_id', parent_id) as detail
	from main.task_outbox
	union all
	select id, 0, case when exists (
			select 1 from main.task_audit where task_id = id and seq = 1 and event = 'queued')
			or version = 0 and (status = 'scheduled' or status = 'pending' and next_run_at > created_at)
		then 'scheduled' else 'queued' end,
		created_at, null, null, null, null, null
	from main.task_outbox
	where not exists (select 1 from main.task_audit where task_id = id and seq = 1 and event = 'scheduled')
	union all
	select task_id, seq, event, at, attempt, owner, actor, reason, detail
	from main.task_audit
)
order by task_id, seq;

-- schema_version 2
