'use strict';
// Refreshes the list of held locks in place: scroll, selection, focus and what is being typed stay.
{
    const EVERY = 5000;
    const REMEMBERED = 'fencedlock-paused';

    const start = function() {
        const control = document.getElementById('fencedlock-refresh');
        if (!control) {
            return;
        }
        const button = control.querySelector('button');
        const status = control.querySelector('span');
        let paused = localStorage.getItem(REMEMBERED) === 'yes';
        let last = new Date();

        const show = function() {
            button.setAttribute('aria-pressed', String(paused));
            button.textContent = paused ? button.dataset.resume : button.dataset.pause;
            status.textContent = paused ? status.dataset.paused : status.dataset.live;
        };

        const put = function(fresh, selector) {
            const here = document.querySelector(selector);
            const there = fresh.querySelector(selector);
            if (here && there) {
                here.replaceWith(there);
            }
        };

        const replace = function(fresh) {
            const list = document.getElementById('result_list');
            if (Boolean(list) !== Boolean(fresh.getElementById('result_list'))) {
                // From none to some, or the other way: the page has another shape.
                location.reload();
                return;
            }
            const focused = list && list.contains(document.activeElement) ?
                document.activeElement.getAttribute('href') : null;
            put(fresh, '#result_list tbody');
            put(fresh, '#fencedlock-notices');
            put(fresh, '.paginator');
            if (focused) {
                const again = document.querySelector(`#result_list a[href="${CSS.escape(focused)}"]`);
                if (again) {
                    again.focus({preventScroll: true});
                }
            }
        };

        const refresh = async function() {
            if (paused || document.hidden) {
                return;
            }
            try {
                const answer = await fetch(location.href, {credentials: 'same-origin', redirect: 'error'});
                if (!answer.ok) {
                    throw new Error(answer.status);
                }
                replace(new DOMParser().parseFromString(await answer.text(), 'text/html'));
                last = new Date();
                show();
            } catch (error) {
                status.textContent = `${status.dataset.failed} ${last.toLocaleTimeString()}.`;
            }
        };

        button.addEventListener('click', function() {
            paused = !paused;
            localStorage.setItem(REMEMBERED, paused ? 'yes' : 'no');
            show();
            refresh();
        });
        control.hidden = false;
        show();
        // One after the other: a slow server isn't asked again before it has answered.
        const next = () => setTimeout(async function() {
            await refresh();
            next();
        }, EVERY);
        next();
    };

    if (document.readyState === 'loading') {
        document.addEventListener('DOMContentLoaded', start);
    } else {
        start();
    }
}
